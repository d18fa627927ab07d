"""The finetuning engine on a GPU: ``python tests/finetune/run_on_gpu.py``; needs torch, transformers, peft, cuda-bindings.

What only a GPU can show: bf16 within its noise, graphs and slots under real streams, memory that really goes back,
partitions. Prints one line a check with its figures and exits 1 if one fails. No pytest needed.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for bit-equal repetitions

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

from backends.cuda.finetune import layer_pass
from backends.cuda.finetune.engine import FinetuneEngine
from backends.cuda.finetune.layer_graphs import GraphRunner
from backends.cuda.finetune.layer_pass import AttentionInputs
from backends.cuda.finetune.layer_weights import WindowedWeights
from backends.cuda.finetune.micro_batch import Sample
from benchmarks.finetune.partition import partition_stream
from tests.finetune.tiny import (
    Collected,
    plain_gradients,
    recipe,
    run_step,
    tiny_engine,
    tiny_feed,
    tiny_peft,
    worst_difference,
)

MIDDLE = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "max_position_embeddings": 1024,
}
LENGTH, LAYERS = 256, 6


def model(kind: str = "llama", dtype: Any = torch.bfloat16, **lora: Any) -> Any:
    """A model large enough for real kernels: heads of 128, all projections trained."""
    return tiny_peft(kind, dtype, base=MIDDLE, **{"r": 16, "lora_alpha": 32, "target_modules": "all-linear", **lora})


def feed(seed: int = 0) -> Any:
    """Micro-batches of two samples of one length, the first half of each a prompt."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(8):
        ids = rng.integers(0, 4096, LENGTH)
        labels = ids.copy()
        labels[: LENGTH // 2] = -100
        samples.append(Sample(ids, labels))
    return tiny_feed(4, 2 * LENGTH, samples=samples, shuffle=False)


def engine_of(made: Any, steps: int = 4, **options: Any) -> tuple[FinetuneEngine, Collected]:
    """An engine on the GPU, and its reports."""
    seen = Collected()
    plan = recipe(steps, learning_rate=options.pop("learning_rate", 1e-3))
    return tiny_engine(made, feed(), plan, on_step=seen, **{"device": "cuda", **options}), seen


def finish(engine: FinetuneEngine, streams: list[Any], between: Callable[[], None] | None = None) -> None:
    """All units, each on the next of ``streams``."""
    turn = 0
    while (unit := engine.next_unit()) is not None:
        if between is not None:
            between()
        engine.run(unit, streams[turn % len(streams)])
        turn += 1
    engine.close()


def gradients_on(engine: FinetuneEngine, stream: Any) -> dict[str, Any]:
    """Gradients of the optimizer step after the next, when all units are graphs."""
    run_step(engine, stream)
    while (unit := engine.next_unit()) is not None and unit.kind != "optimizer":
        engine.run(unit, stream)
    torch.cuda.synchronize()
    return {
        state.submodel.prefix + name: view.float().clone()
        for state in engine.states.all
        for name, view in zip(state.names, state.gradient_views, strict=True)
    }


def bf16_gradients_within_noise() -> str:
    """Gradients in bf16 are as far from fp32 ones as those of a plain bf16 loop are, Llama and Qwen2."""
    told = []
    for kind in ("llama", "qwen2"):
        wide = model(kind, torch.bfloat16).to("cuda", torch.float32)
        narrow = model(kind, torch.bfloat16).to("cuda")
        engine, _ = engine_of(model(kind), 4, learning_rate=0.0)  # the second step sees the first one's parameters
        exact = plain_gradients(wide, feed().batch(1), mask=False)[1]
        plain = plain_gradients(narrow, feed().batch(1), mask=False)[1]
        found = gradients_on(engine, torch.cuda.Stream())
        assert isinstance(engine.runner, GraphRunner)
        assert engine.runner.counters.replayed > 0

        def distance(gradients: dict[str, Any], exact: dict[str, Any] = exact) -> float:
            far = sum(float((gradients[name].float() - exact[name]).square().sum()) for name in exact)
            return float((far / sum(float(part.square().sum()) for part in exact.values())) ** 0.5)

        ours, theirs = distance(found), distance(plain)
        told.append(f"{kind}: {ours:.4f} from fp32, plain {theirs:.4f}")
        assert ours < 1.2 * theirs, told
    return "; ".join(told)


def leaving_the_last_product_out_changes_no_bit() -> str:
    """bf16: a backward unit's gradients are those after a whole recomputation."""
    layer = model().to("cuda").get_base_model().model.layers[1].train()
    hidden, by_output = torch.randn(2, 4, LENGTH, MIDDLE["hidden_size"], device="cuda").bfloat16()
    rotary = model().get_base_model().model.rotary_emb.to("cuda")
    inputs = AttentionInputs.of(rotary, hidden, torch.arange(LENGTH, device="cuda")[None], None)
    parameters = [part for part in layer.parameters() if part.requires_grad]

    def whole() -> tuple[Any, list[Any]]:
        kept = layer_pass.forward_kept(layer, hidden, inputs)
        return layer_pass.backward_kept(*kept, by_output, parameters, by_input=True)

    def without() -> tuple[Any, list[Any]]:
        return layer_pass.backward(layer, hidden, by_output, inputs, parameters, by_input=True)

    outcomes = [[by_hidden, *gradients] for by_hidden, gradients in (whole(), without())]
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))
    return f"{len(parameters)} trained parameters"


def graphs_train_as_eager_units_do() -> str:
    """fp32, dropout: losses with and without graphs agree to 1e-5, so recomputation in graphs draws the same masks."""
    losses = []
    for graphs in (False, True):
        engine, seen = engine_of(model(dtype=torch.float32, lora_dropout=0.2), 6, graphs=graphs)
        finish(engine, [torch.cuda.Stream()])
        losses.append(seen.losses)
    worst = max(abs(a / b - 1) for a, b in zip(*losses, strict=True))
    assert worst < 1e-5, losses
    return f"worst difference of a loss {worst:.1e}"


def dropout_gradients_are_those_of_a_plain_loop_of_units() -> str:
    """fp32 gradients with dropout: graph units against eager ones, every parameter."""
    found = []
    for graphs in (False, True):
        engine, _ = engine_of(model(dtype=torch.float32, lora_dropout=0.2), 4, graphs=graphs)
        found.append(gradients_on(engine, torch.cuda.Stream()))
    worst = worst_difference(found[1], found[0])
    assert worst < 1e-4, worst
    return f"worst {worst:.1e}"


def windows_and_streams_change_no_bit() -> str:
    """Window shrunk and grown at random, units on two streams in turn: bit-equal losses and parameters."""
    outcomes = []
    for disturbed in (False, True):
        engine, seen = engine_of(model(), 6, window_layers=3 if disturbed else None)
        rng = np.random.default_rng(1)

        def disturb(engine: FinetuneEngine = engine, rng: Any = rng) -> None:
            if rng.random() < 0.2:
                engine.shrink_window(int(rng.integers(2, LAYERS)))
                engine.grow_window(int(rng.integers(2, LAYERS + 1)))

        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        finish(engine, streams if disturbed else streams[:1], disturb if disturbed else None)
        outcomes.append((seen.losses, engine.states.tensors()))
    assert outcomes[0][0] == outcomes[1][0], (outcomes[0][0], outcomes[1][0])
    assert all(torch.equal(part, outcomes[1][1][name]) for name, part in outcomes[0][1].items())
    return f"losses {outcomes[0][0][0]:.4f} to {outcomes[0][0][-1]:.4f}"


def shrinking_gives_memory_back() -> str:
    """Every dropped layer's bytes are free in torch at once, without waiting, and the job goes on."""
    engine, _ = engine_of(model(), 4)
    stream = torch.cuda.Stream()
    run_step(engine, stream)
    before = torch.cuda.memory_allocated()
    assert engine.shrink_window(2) == 2
    freed = before - torch.cuda.memory_allocated()
    weights = engine.weights
    assert isinstance(weights, WindowedWeights)
    assert freed >= 4 * weights.layer_bytes, (freed, weights.layer_bytes)
    finish(engine, [stream])
    assert engine.state.status == "finished"
    return f"{freed / 2**20:.0f} MiB for four layers of {weights.layer_bytes / 2**20:.0f}"


def partitions_train_the_same() -> str:
    """Units in turn on the whole chip and on two partitions, cuBLAS told or not by timing: losses within bf16 noise."""
    plain, seen_plain = engine_of(model(), 8)
    finish(plain, [torch.cuda.Stream()])
    parted, seen = engine_of(model(), 8)
    finish(parted, [torch.cuda.Stream(), partition_stream(64)[0], partition_stream(32)[0]])
    worst = max(abs(a / b - 1) for a, b in zip(seen.losses, seen_plain.losses, strict=True))
    assert worst < 5e-3, (seen.losses, seen_plain.losses)
    assert isinstance(parted.runner, GraphRunner)
    told = parted.runner.counters.targeted
    assert told, "no partition was recognised: SM counts of streams cannot be read, or cuBLAS was not found"
    return f"worst {worst:.1e}; cuBLAS told in {sum(told.values())} of {len(told)} shapes"


def a_bad_loss_is_seen_without_waiting() -> str:
    """NaN weights fail the job, and no parameter has changed by then."""
    engine, _ = engine_of(model(), 50)
    stream = torch.cuda.Stream()
    run_step(engine, stream)
    torch.cuda.synchronize()
    before = {name: part.clone() for name, part in engine.states.masters().items()}
    engine.model.norm.module.weight.data.fill_(float("nan"))
    while (unit := engine.next_unit()) is not None:
        engine.run(unit, stream)
    torch.cuda.synchronize()
    assert engine.state.status == "failed", engine.state
    assert all(torch.equal(part, before[name]) for name, part in engine.states.masters().items())
    return str(engine.state.reason)


CHECKS = (
    bf16_gradients_within_noise,
    leaving_the_last_product_out_changes_no_bit,
    graphs_train_as_eager_units_do,
    dropout_gradients_are_those_of_a_plain_loop_of_units,
    windows_and_streams_change_no_bit,
    shrinking_gives_memory_back,
    partitions_train_the_same,
    a_bad_loss_is_seen_without_waiting,
)


def main() -> int:
    """Run them all; 1 if one failed."""
    if not torch.cuda.is_available():
        print("no GPU here")  # noqa: T201
        return 1
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    failed = 0
    for check in CHECKS:
        begin_s = time.perf_counter()
        try:
            figures = check()
            print(f"ok    {check.__name__}: {figures} ({time.perf_counter() - begin_s:.1f} s)", flush=True)  # noqa: T201
        except Exception:
            failed += 1
            print(f"FAIL  {check.__name__}", flush=True)  # noqa: T201
            traceback.print_exc()
    torch_on = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{len(CHECKS) - failed} of {len(CHECKS)} passed on {torch_on}")  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
