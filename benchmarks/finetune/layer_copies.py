"""How long a small copy to the GPU waits while frozen layers are swapped in, by the pieces they come in. See README.md.

    python benchmarks/finetune/layer_copies.py        # one GPU, a minute; writes results/layer_copies.json

What a decode step copies (slots of a prompt, inputs of a graph) goes the same way as the layers of a window do.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import backends.cuda.finetune  # noqa: F401  the installed packages, before the checkout's folders come into reach
import harli_cli  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks.*, ahead of other packages' folders

import numpy as np
import torch

from backends.cuda.finetune.layer_weights import PIECE_BYTES, copy_in_pieces
from benchmarks.allocator.measuring import commit, machine
from benchmarks.record import results_folder, write_json
from harli_core.summary import distribution

LAYER_BYTES = 436_224_000
"""Frozen weights of a layer of LLaMA3-8B, about."""

PIECES = {"whole": LAYER_BYTES, "64 MiB": 64 << 20, "16 MiB": PIECE_BYTES, "4 MiB": 4 << 20}

QUEUED = (1, 4)
"""Layers that are enqueued at a time."""

SAMPLES, PAUSE_S = 150, 0.002

SLOTS = 1024
"""Of a prompt, int64."""


class Copies:
    """Layers copied one behind the other on a stream of their own, so many at a time."""

    def __init__(self, piece_bytes: int, queued: int) -> None:
        """Nothing is enqueued."""
        self._piece_bytes, self._queued = piece_bytes, queued
        self._stream = torch.cuda.Stream()
        self._masters = [torch.zeros(LAYER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._slots = [torch.empty(LAYER_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._last: list[torch.cuda.Event] = []
        self.layers = 0
        self.enqueue_us: list[float] = []

    def keep_going(self) -> None:
        """Enqueue anew when half of what was enqueued is over."""
        while self._last and self._last[0].query():
            self._last.pop(0)
        while len(self._last) <= self._queued // 2:
            for _ in range(self._queued - len(self._last)):
                begin_s = time.perf_counter()
                with torch.cuda.stream(self._stream):
                    copy_in_pieces(self._slots[self.layers % 2], self._masters[self.layers % 2], self._piece_bytes)
                    event = torch.cuda.Event()
                    event.record()
                self.enqueue_us.append((time.perf_counter() - begin_s) * 1e6)
                self._last.append(event)
                self.layers += 1


def there_and_back_ms(stream: torch.cuda.Stream, pinned: torch.Tensor | None) -> float:
    """As in an admission: some slots are sent, and one number is read back behind them."""
    with torch.cuda.stream(stream):
        begin_s = time.perf_counter()
        source = torch.from_numpy(np.arange(SLOTS)) if pinned is None else pinned
        sent = source.to("cuda", non_blocking=True)
        int(sent[-1])
        return (time.perf_counter() - begin_s) * 1e3


def measured(copies: Copies | None) -> dict[str, Any]:
    """Small copies while layers are copied (`None`: none are), from pageable and from pinned memory."""
    stream = torch.cuda.Stream()
    found: dict[str, Any] = {}
    for name, pinned in (("pageable", None), ("pinned", torch.arange(SLOTS).pin_memory())):
        waits: list[float] = []
        begin_s, before = time.perf_counter(), copies.layers if copies is not None else 0
        while len(waits) < SAMPLES:
            until_s = time.perf_counter() + PAUSE_S
            while time.perf_counter() < until_s:
                if copies is not None:
                    copies.keep_going()
            waits.append(there_and_back_ms(stream, pinned))
        took_s = time.perf_counter() - begin_s
        found[name] = {"wait_ms": distribution(np.asarray(waits))}
        if copies is not None:
            found[name]["layers_gb_per_s"] = (copies.layers - before) * LAYER_BYTES / took_s / 1e9
    torch.cuda.synchronize()
    if copies is not None:
        found["enqueue_us"] = distribution(np.asarray(copies.enqueue_us))
    return found


def main() -> None:
    """Each size of pieces, with one layer and with several enqueued."""
    there_and_back_ms(torch.cuda.Stream(), None)
    document: dict[str, Any] = {
        "benchmark": "layer_copies",
        "machine": machine(),
        "commit": commit(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "layer_bytes": LAYER_BYTES,
        "no layers": measured(None),
    }
    for name, piece_bytes in PIECES.items():
        for queued in QUEUED:
            found = document[f"{name}, {queued} enqueued"] = measured(Copies(piece_bytes, queued))
            waits = {
                kind: [found[kind]["wait_ms"][of] for of in ("p50", "p99", "max")] for kind in ("pageable", "pinned")
            }
            print(json.dumps({name: queued, **waits}), flush=True)
    write_json(results_folder(__file__) / "layer_copies.json", document)


if __name__ == "__main__":
    main()
