"""Randomness of dropout: a function of the seed and of the place of the draw, not of the order of the units."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

EMBEDDING, HEAD = -1, -2
"""Stand for the submodels that are no layers."""


def unit_seed(seed: int, step: int, micro_batch: int, submodel: int, part: int = 0) -> int:
    """Seed of torch's generator for one submodel and micro-batch, the same in forward and in recomputation."""
    place = f"{seed}/{step}/{micro_batch}/{submodel}/{part}".encode()
    return int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little") >> 1


@contextmanager
def seeded(seed: int | None, device: Any) -> Iterator[None]:
    """Torch's generators begin at ``seed`` inside and are as before afterwards; `None`: nothing here draws."""
    if seed is None:
        yield
        return
    import torch

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def draws(module: Any) -> bool:
    """Whether a forward pass of ``module`` in training draws random numbers."""
    import torch

    return any(
        (isinstance(part, torch.nn.Dropout) and part.p > 0) or getattr(part, "attention_dropout", 0.0) > 0
        for part in module.modules()
    )
