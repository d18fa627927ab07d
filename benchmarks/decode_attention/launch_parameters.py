"""How fast decode attention reads KV on a partition, by how it is launched. See README.md.

    python benchmarks/decode_attention/launch_parameters.py        # one GPU, a minute; writes results/launch_parameters.json

Launches SGLang's kernel on streams of SM partitions, over four layers in turn, so that no cache holds their KV.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import backends.cuda.memory  # noqa: F401  the installed packages, before the checkout's folders come into reach
import harli_cli  # noqa: F401
import harli_core  # noqa: F401
import traces  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks.*, ahead of other packages' folders

import numpy as np
import torch

from backends.cuda.serving import decode_attention, sglang_version
from backends.cuda.serving.partitions import Partitions, cuda_partitions
from benchmarks.allocator.measuring import commit, machine
from benchmarks.record import results_folder, write_json
from harli_cli.package_data import shipped_profile

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""Of LLaMA3-8B."""

KV_BYTES = 2 * KV_HEADS * HEAD_DIM * 2
"""K and V of a token in one layer."""

SLOTS, LAYERS, MOST_SPLITS = 140_000, 4, 8
"""Token slots of a layer's KV; layers that take turns; parts of a request's KV at most, as SGLang has it."""

SGLANG = (32, 4, 2)
"""Tokens of a tile, warps, stages, as SGLang launches it."""

CHOICES = (SGLANG, *((tile, warps, 3) for tile in (32, 64, 128) for warps in (1, 2, 4, 8)), (64, 4, 2), (128, 4, 2))

REPLAYS = 5


class Requests:
    """A batch: how long its requests' KV is, and in which slots."""

    def __init__(self, lengths: Sequence[int], *, scattered: bool = False) -> None:
        """Slots in order, or drawn at random."""
        drawn = np.random.default_rng(0).permutation(SLOTS - 1) if scattered else np.arange(SLOTS - 1)
        ends = np.concatenate(([0], np.cumsum(lengths)))
        self.batch, self.tokens = len(lengths), int(ends[-1])
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.ends = torch.tensor(ends, dtype=torch.int32, device="cuda")
        self.slots = torch.tensor(drawn[: self.tokens] + 1, dtype=torch.int64, device="cuda")


def uneven(batch: int, mean_tokens: int) -> list[int]:
    """Lengths that differ as those of conversations do."""
    drawn = np.random.default_rng(batch).lognormal(0.0, 0.9, batch)
    return [max(40, int(tokens)) for tokens in drawn * mean_tokens / drawn.mean()]


class Attention:
    """One batch's decode attention on random K and V."""

    def __init__(self, requests: Requests, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Divides each request's KV as SGLang does."""
        from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

        self._requests, self._layers = requests, layers
        batch = requests.batch
        self._query = torch.randn(batch, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        self.parts = torch.zeros(batch, HEADS, MOST_SPLITS, HEAD_DIM, device="cuda")
        self._weights = torch.zeros(batch, HEADS, MOST_SPLITS, device="cuda")
        self._splits = torch.zeros(batch, dtype=torch.int32, device="cuda")
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        get_num_kv_splits_triton[(1,)](
            self._splits, requests.lengths, batch, 1, HEADS, KV_HEADS, MOST_SPLITS, sms, MAX_NUM_SEQ=256
        )

    def launch(self, layer: int, tile: int, warps: int, stages: int) -> None:
        """SGLang's kernel, with the arguments that SGLang gives it and other launch parameters."""
        from sglang.kernels.ops.attention import decode_attention as of_sglang

        keys, values = self._layers[layer % LAYERS]
        requests, query, parts = self._requests, self._query, self.parts
        getattr(of_sglang, decode_attention.KERNEL)[(requests.batch, KV_HEADS, MOST_SPLITS)](
            query, keys, values, HEAD_DIM**-0.5, requests.ends, requests.slots, parts, self._weights, self._splits,
            *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2], 0, 0, 0, 0, *parts.stride()[:3],
            kv_group_num=HEADS // KV_HEADS, q_head_num=HEADS, BLOCK_DMODEL=HEAD_DIM, BLOCK_DPE=0, BLOCK_DV=HEAD_DIM,
            BLOCK_N=tile, BLOCK_H=16, MIN_BLOCK_KV=32, logit_cap=0.0, xai_temperature_len=-1,
            num_warps=warps, num_stages=stages, Lk=HEAD_DIM, Lv=HEAD_DIM,
        )  # fmt: skip


def layer_us(stream: Any, launch: Callable[[int], None]) -> float:
    """GPU time of one launch on ``stream``: the median of replays of a graph of 16."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for layer in range(16):
            launch(layer)
    found = []
    with torch.cuda.stream(stream):
        graph.replay()
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 16 * 1e3)
    return float(np.median(found))


def of_batch(requests: Requests, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], partitions: Partitions) -> Any:
    """Every choice on every partition."""
    attention = Attention(requests, layers)
    streams = {partitions.total_sms: partitions.whole.decode_stream}
    streams |= {lane.split.decode_sms: lane.decode_stream for lane in reversed(partitions.lanes)}
    attention.launch(0, *SGLANG)
    torch.cuda.synchronize()
    expected = attention.parts.clone()
    by_choice = []
    for choice in CHOICES:
        tile, warps, stages = choice
        launch = partial(attention.launch, tile=tile, warps=warps, stages=stages)
        launch(0)
        torch.cuda.synchronize()
        difference = float((attention.parts - expected).abs().max())
        us = {sms: layer_us(stream, launch) for sms, stream in streams.items()}
        by_choice.append({"tile": tile, "warps": warps, "stages": stages, "us": us, "differs_by": difference})
    return {"requests": requests.batch, "kv_tokens": requests.tokens, "launches": by_choice}


def table(batches: dict[str, Any]) -> str:
    """Microseconds a layer: SGLang's choice, the fastest one, and at what rate that reads K and V."""
    lines = [
        "| batch | SMs | SGLang's launch, us | fastest, us | tile, warps, stages | TB/s |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in batches.items():
        launches, kv_bytes = found["launches"], found["kv_tokens"] * KV_BYTES
        for sms in launches[0]["us"]:
            us = [one["us"][sms] for one in launches]
            best_us, plain_us = min(us), us[CHOICES.index(SGLANG)]
            chosen = ", ".join(map(str, CHOICES[us.index(best_us)]))
            rate = kv_bytes / best_us / 1e6
            lines.append(f"| {name} | {sms} | {plain_us:.0f} | {best_us:.0f} | {chosen} | {rate:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, write, print."""
    sglang_version.prepare("cuda")
    profile = shipped_profile("h200", "llama3-8b", "llama3-8b")
    partitions = cuda_partitions(profile.splits, profile.total_sms, print)
    shape = (SLOTS, KV_HEADS, HEAD_DIM)
    layers = [
        (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16),
            torch.randn(shape, device="cuda", dtype=torch.bfloat16),
        )
        for _ in range(LAYERS)
    ]
    batches = {
        "64 of 1,024": Requests([1024] * 64),
        "14 uneven, 1,150": Requests(uneven(14, 1150)),
        "60 uneven, 1,150": Requests(uneven(60, 1150)),
        "60 uneven, slots scattered": Requests(uneven(60, 1150), scattered=True),
        "112 uneven, 1,150": Requests(uneven(112, 1150)),
    }
    found = {}
    for name, requests in batches.items():
        found[name] = of_batch(requests, layers, partitions)
        print(json.dumps({name: found[name]["launches"][0]["us"]}), flush=True)
    path = results_folder(__file__) / "launch_parameters.json"
    write_json(
        path,
        {
            "benchmark": "decode_attention",
            "machine": machine(),
            "sglang": sglang_version.installed(),
            "commit": commit(),
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "batches": found,
        },
    )
    print(table(found))
    print(f"\nwritten: {path}")


if __name__ == "__main__":
    main()
