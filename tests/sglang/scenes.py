"""Serving with finetuning beside it, as tests on a CPU and checks on a GPU both run it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from backends.cuda.serving.instance import Instance
from backends.cuda.serving.job_source import JobSettings
from backends.cuda.serving.serving_loop import LoopLimits, ServingLoop
from harli_core.predict.predictor import StepPredictor
from harli_core.qos.first_job import first_job_plan
from harli_core.records import RequestBook, StepBook
from harli_core.requests import RequestSpec
from harli_core.types import Hold, StepPlan, StepResult, StepView


@dataclass(frozen=True)
class Shape:
    """A random model and the requests for it."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 128
    vocab: int = 256
    std: float = 0.3


def random_folder(folder: Path, shape: Shape, dtype: str) -> dict[str, Any]:
    """Write a Llama with random weights large enough that greedy tokens differ; returns its configuration."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=shape.std)
        model.save_pretrained(folder)
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def prompts(count: int, vocab: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of random lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab, int(rng.integers(4, longest))).tolist() for _ in range(count)]


class Scripted:
    """A policy for tests: walks through ``choices``, a new one every ``hold`` steps.

    A choice is ``(split, turn_ms, share)``: an index into the splits or `None` for the whole chip, and the share of the
    wanted rows that the job may hold.
    """

    serves = True

    def __init__(
        self,
        predictor: StepPredictor,
        choices: Sequence[tuple[int | None, float, float]],
        *,
        finetunes: bool,
        hold: int = 2,
    ) -> None:
        """Without ``finetunes`` the same splits are used for decode alone."""
        self.finetunes = finetunes
        self._capabilities = predictor.profile.capabilities
        self._choices, self._hold = choices, hold
        self.asked = 0
        self.results: list[StepResult] = []

    def plan(self, view: StepView) -> StepPlan:
        """The next choice."""
        split, turn_ms, share = self._choices[self.asked % len(self._choices)]
        self.asked += 1
        total = self._capabilities.total_sms
        rows = [max(job.rows_floor, int(job.rows_wanted * share)) for job in view.jobs]
        if view.batch == 0:
            return first_job_plan(view, rows, Hold(1, None), total, total if view.jobs else 0)
        hold = Hold(self._hold, None)
        decode_sms = total if split is None else self._capabilities.splits[split].decode_sms
        if not view.jobs:
            return StepPlan(decode_sms, (), hold)
        finetune_sms = 0 if split is None else self._capabilities.splits[split].finetune_sms
        return first_job_plan(view, rows, hold, decode_sms, finetune_sms, turn_ms)

    def observe(self, result: StepResult) -> None:
        """Keep it."""
        self.results.append(result)


CHURN: tuple[tuple[int | None, float, float], ...] = (
    (0, 2.0, 1.0), (6, 0.0, 0.0), (None, 4.0, 0.5), (3, 1.0, 1.0), (5, 0.0, 0.3), (1, 3.0, 0.0), (4, 0.0, 0.8),
)  # fmt: skip
"""Every kind of split and turn, and a window that grows and shrinks all the time."""


@dataclass
class Holding:
    """A policy whose plans all hold as ``hold`` says, without finetuning."""

    hold: Hold
    serves: bool = True
    finetunes: bool = False
    views: list[StepView] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)

    def plan(self, view: StepView) -> StepPlan:
        """The whole chip to decode."""
        self.views.append(view)
        bounds = self.hold.batches
        covered = view.batch and (bounds is None or view.batch <= bounds[1])
        return StepPlan(132, (), self.hold if covered else Hold(1, None))

    def observe(self, result: StepResult) -> None:
        """Keep it."""
        self.results.append(result)


@dataclass
class Served:
    """What a run gave."""

    tokens: dict[int, list[int]]
    loop: ServingLoop
    steps: StepBook
    requests: RequestBook
    policy: Any


def serve(
    instance: Instance,
    policy: Any,
    given: Sequence[Sequence[int]],
    output_tokens: int,
    gap_s: float = 0.0,
    max_batch: int = 64,
    sink: Any = None,
    each_step: Callable[[ServingLoop], None] | None = None,
    horizon_s: float | None = None,
) -> Served:
    """Run all requests to their end."""
    specs = [RequestSpec(index, gap_s * index, len(ids), output_tokens) for index, ids in enumerate(given)]
    book = RequestBook(np.array([len(ids) for ids in given]), np.full(len(given), output_tokens))
    limits = LoopLimits(max_batch, horizon_s)
    loop, steps = instance.serve(policy, book, iter(specs), lambda spec: given[spec.index], 40.0, limits, sink)
    if each_step is not None:
        finish = instance.decoder.finish

        def checked(now_ms: float) -> Any:
            done = finish(now_ms)
            each_step(loop)
            return done

        instance.decoder.finish = checked  # type: ignore[method-assign]
    try:
        with instance.on_stream():
            loop.run()
    finally:
        instance.decoder.__dict__.pop("finish", None)
    return Served({served.index: served.tokens for served in loop.finished}, loop, steps, book, policy)


def kv_checksums(instance: Instance) -> dict[str, str]:
    """A hash of all KV of each running request, by its name, wherever its tokens lie."""
    import torch

    decoder = instance.decoder
    pool = decoder.scheduler.token_to_kv_pool_allocator.get_kvcache()
    found = {}
    for request in decoder.running:
        held = len(request.origin_input_ids) + len(request.output_ids) - 1
        slots = decoder.scheduler.req_to_token_pool.req_to_token[request.req_pool_idx, :held].long()
        digest = hashlib.sha256()
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            digest.update(buffer[slots].contiguous().view(torch.uint8).cpu().numpy().tobytes())
        found[request.rid] = digest.hexdigest()
    return found


class FaultyWork:
    """A job whose ``fault`` strikes in its ``at``-th unit; everything else is the real engine's."""

    def __init__(self, work: Any, at: int, fault: Callable[[], None]) -> None:
        """Wrap ``work``."""
        self._work, self._at, self._fault = work, at, fault
        self._units = 0

    def __getattr__(self, name: str) -> Any:
        """The engine's."""
        return getattr(self._work, name)

    def run(self, unit: Any, stream: Any = None, host_ms: float | None = None) -> None:
        """The engine's, until it fails."""
        self._units += 1
        if self._units == self._at:
            self._fault()
        self._work.run(unit, stream, host_ms)


def unit_raises() -> None:
    """Some fault of a unit."""
    raise RuntimeError("a unit failed")


def out_of_memory() -> None:
    """More memory than there is, really asked for on a GPU."""
    import torch

    if torch.cuda.is_available():
        torch.empty(2**46, dtype=torch.uint8, device="cuda")
    raise MemoryError("out of memory")


def nan_in_adapter(instance: Instance) -> None:
    """A LoRA matrix becomes NaN, as a corrupted adapter or a diverging run has it."""
    assert instance.engine is not None
    state = next(state for state in instance.engine.states.layers if state is not None)
    for tensor in state.parameters:
        tensor.data.fill_(float("nan"))


def job_of(config: dict[str, Any], unit_tokens: int, *, shared: bool = False, micro_batches: int = 2) -> JobSettings:
    """A random job on the same kind of model."""
    return JobSettings(config, unit_tokens, micro_batches, rank=4, shared=shared)
