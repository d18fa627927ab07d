"""How long a small copy to the GPU waits while frozen layers are swapped in, by how many are enqueued. See README.md.

    python benchmarks/finetune/layer_copies.py        # one GPU, a minute; writes results/layer_copies.json

What a decode step copies (slots of a prompt, inputs of a graph) goes the same way as the layers of a window do.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import backends.cuda.finetune  # noqa: F401  the installed packages, before the checkout's folders come into reach
import harli_cli  # noqa: F401
import harli_core  # noqa: F401
import traces  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks.*, ahead of other packages' folders

import numpy as np
import torch

from backends.cuda.finetune.layer_copies import BESIDE_DECODE, LayerCopies, LayerCopy, TorchCopyStream
from benchmarks.allocator.measuring import commit, machine
from benchmarks.record import results_folder, write_json
from harli_core.summary import distribution

LAYER_BYTES = 436_224_000
"""Frozen weights of a layer of LLaMA3-8B, about."""

BACKLOGS = {"1 layer at once": (1, None), "10 layers at once": (10, None), "10 layers, fed": (10, BESIDE_DECODE)}
"""Layers that are begun at a time, and pieces that may be under way."""

SLOTS = (64, 1024, 4096)
"""Of a prompt, int64."""

SAMPLES, PAUSE_S = 100, 0.002


class Swaps:
    """Layers that are begun again and again, as if a window moved."""

    def __init__(self, layers: int, most_pieces: int | None) -> None:
        """Nothing is enqueued."""
        self._layers = layers
        self._copies = LayerCopies(TorchCopyStream(torch.cuda.Stream()), most_pieces)
        self._master = torch.zeros(LAYER_BYTES, dtype=torch.uint8, pin_memory=True)
        self._slot = torch.empty(LAYER_BYTES, dtype=torch.uint8, device="cuda")
        self._begun: deque[LayerCopy] = deque()
        self.done = 0

    def go_on(self) -> None:
        """Begin a layer for each that is there."""
        while self._begun and self._begun[0].over:
            self._begun.popleft()
            self.done += 1
        while len(self._begun) < self._layers:
            self._begun.append(self._copies.begin(self._slot, self._master, None))
        self._copies.feed()


def there_and_back_ms(stream: torch.cuda.Stream, source: torch.Tensor) -> float:
    """As in an admission: some slots are sent, and one number is read back behind them."""
    with torch.cuda.stream(stream):
        begin_s = time.perf_counter()
        int(source.to("cuda", non_blocking=True)[-1])
        return (time.perf_counter() - begin_s) * 1e3


def measured(swaps: Swaps | None) -> dict[str, Any]:
    """Small copies of each size, from pageable and from pinned memory, while layers are swapped in (`None`: none are)."""
    stream = torch.cuda.Stream()
    found: dict[str, Any] = {}
    for slots in SLOTS:
        for kind in ("pageable", "pinned"):
            source = torch.from_numpy(np.arange(slots))
            source = source.pin_memory() if kind == "pinned" else source
            waits: list[float] = []
            begin_s, before = time.perf_counter(), 0 if swaps is None else swaps.done
            while len(waits) < SAMPLES:
                until_s = time.perf_counter() + PAUSE_S
                while time.perf_counter() < until_s:
                    if swaps is not None:
                        swaps.go_on()
                waits.append(there_and_back_ms(stream, source))
            took_s = time.perf_counter() - begin_s
            rate = None if swaps is None else (swaps.done - before) * LAYER_BYTES / took_s / 1e9
            found[f"{slots} slots, {kind}"] = {"wait_ms": distribution(np.asarray(waits)), "layers_gb_per_s": rate}
    torch.cuda.synchronize()
    return found


def main() -> None:
    """Without layers, and beside each backlog of them."""
    there_and_back_ms(torch.cuda.Stream(), torch.arange(8))
    document: dict[str, Any] = {
        "benchmark": "layer_copies",
        "machine": machine(),
        "commit": commit(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "layer_bytes": LAYER_BYTES,
        "no layers": measured(None),
    }
    for name, (layers, most_pieces) in BACKLOGS.items():
        document[name] = measured(Swaps(layers, most_pieces))
        for what, figures in document[name].items():
            wait = figures["wait_ms"]
            print(json.dumps({name: what, **{of: round(wait[of], 3) for of in ("p50", "p99", "max")}}), flush=True)
    write_json(results_folder(__file__) / "layer_copies.json", document)


if __name__ == "__main__":
    main()
