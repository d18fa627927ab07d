"""Samples as tensors: micro-batches of one shape each, and the optimizer batch that they make up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IGNORED = -100
"""Label of a token that is not trained on, as PyTorch and transformers have it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids and labels of one sequence. ``segments`` numbers the sequences packed into it (`None`: it is one)."""

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    segments: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """Tokens."""
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one unit of each layer computes on; tensors on the host.

    ``ids`` is ``[rows, length]``, padded on the right. ``positions`` are ``[1, length]`` or, where sequences are packed
    apart, ``[rows, length]`` and begin at 0 in each; then ``mask`` (``[rows, 1, length, length]``, true: may look) keeps
    them apart. Otherwise it is `None`: attention is causal, and nothing looks at padding, which comes last.
    ``trained`` are the flat places whose next token counts in the loss, ``targets`` those tokens.
    """

    ids: Any
    positions: Any
    mask: Any
    trained: Any
    targets: Any
    tokens: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and padded length."""
        rows, length = self.ids.shape
        return int(rows), int(length)


@dataclass(frozen=True, slots=True)
class OptimizerBatch:
    """The micro-batches of one optimizer step; the loss is a mean over ``trained_tokens``, those of all of them."""

    micro_batches: tuple[MicroBatch, ...]
    trained_tokens: int
    samples: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Training tokens, padding not counted."""
        return sum(micro_batch.tokens for micro_batch in self.micro_batches)


def padded_length(length: int, multiple: int) -> int:
    """``length`` rounded up to ``multiple``."""
    return -(-length // multiple) * multiple


def collate(samples: Sequence[Sample], length: int) -> MicroBatch:
    """Samples as the rows of one micro-batch, padded to ``length``."""
    import torch

    ids = np.zeros((len(samples), length), np.int64)
    labels = np.full((len(samples), length), IGNORED, np.int64)
    segments = np.full((len(samples), length), -1, np.int64)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = sample.ids
        labels[row, : len(sample)] = sample.labels
        segments[row, : len(sample)] = 0 if sample.segments is None else sample.segments
    next_labels = np.full_like(labels, IGNORED)
    next_labels[:, :-1] = labels[:, 1:]
    apart = any(sample.segments is not None for sample in samples)
    if apart:  # the first token of a packed sequence is no continuation of the one before it
        next_labels[:, :-1][segments[:, :-1] != segments[:, 1:]] = IGNORED
    trained = np.flatnonzero(next_labels != IGNORED)
    positions = torch.arange(length)[None]
    mask = None
    if apart:
        positions = torch.from_numpy(_positions(segments))
        parts = torch.from_numpy(segments)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = ((parts[:, :, None] == parts[:, None, :]) & causal)[:, None]
    return MicroBatch(
        torch.from_numpy(ids),
        positions,
        mask,
        torch.from_numpy(trained),
        torch.from_numpy(next_labels.reshape(-1)[trained]),
        sum(len(sample) for sample in samples),
    )


def optimizer_batch(
    indices: Sequence[int], samples: Sequence[Sample], micro_batch_tokens: int, pad_multiple: int
) -> OptimizerBatch:
    """Cut the samples of one optimizer step into micro-batches of at most ``micro_batch_tokens`` padded tokens.

    Samples of like length go together, so little is padded; a sample that is longer alone makes a micro-batch of its
    own. How the step is cut changes no gradient: the loss is a mean over the tokens of the whole step.
    """
    order = sorted(range(len(samples)), key=lambda place: (-len(samples[place]), place))
    made: list[MicroBatch] = []
    while order:
        length = padded_length(len(samples[order[0]]), pad_multiple)
        count = max(1, micro_batch_tokens // length)
        made.append(collate([samples[place] for place in order[:count]], length))
        order = order[count:]
    trained_tokens = sum(len(micro_batch.targets) for micro_batch in made)
    return OptimizerBatch(tuple(made), trained_tokens, tuple(indices))


def _positions(segments: NDArray[np.int64]) -> NDArray[np.int64]:
    """Place of each token in its segment."""
    length = segments.shape[1]
    places = np.broadcast_to(np.arange(length), segments.shape)
    first = np.ones_like(segments, bool)
    first[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return places - np.maximum.accumulate(np.where(first, places, 0), axis=1)
