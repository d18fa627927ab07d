"""Which samples each optimizer step trains on: a pure function of the step, so that a resumed job repeats nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from backends.cuda.finetune.micro_batch import OptimizerBatch, Sample, optimizer_batch
from harli_core.errors import JobError


class BatchFeed(Protocol):
    """Where the engine gets its optimizer batches from."""

    def batch(self, step: int) -> OptimizerBatch:
        """Return the batch of optimizer step ``step``."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to go on with this feed."""
        ...


@dataclass(frozen=True, slots=True)
class DataCursor:
    """Where an optimizer step begins: samples ``first`` to ``end`` of the order of epoch ``epoch``."""

    epoch: int
    first: int
    end: int


class SampleFeed:
    """Epoch after epoch over ``samples``, shuffled anew in each; the last batch of an epoch may be smaller."""

    def __init__(
        self,
        samples: Sequence[Sample],
        batch_samples: int,
        micro_batch_tokens: int,
        *,
        seed: int,
        shuffle: bool = True,
        pad_multiple: int = 1,
    ) -> None:
        """``batch_samples`` samples an optimizer step; raises `JobError` where there is nothing to train on."""
        if not samples:
            raise JobError("the dataset is empty: there is no sample to train on")
        if not any((sample.labels[1:] != -100).any() for sample in samples):
            raise JobError("no token of the dataset is trained on: every label is masked (are all responses empty?)")
        self.samples = samples
        self.batch_samples = batch_samples
        self.micro_batch_tokens = micro_batch_tokens
        self.seed = seed
        self.shuffle = shuffle
        self.pad_multiple = pad_multiple
        self.steps_per_epoch = -(-len(samples) // batch_samples)
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def cursor(self, step: int) -> DataCursor:
        """Place of optimizer step ``step`` in the data."""
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.batch_samples
        return DataCursor(epoch, first, min(first + self.batch_samples, len(self.samples)))

    def batch(self, step: int) -> OptimizerBatch:
        """See `BatchFeed`."""
        at = self.cursor(step)
        indices = self._order(at.epoch)[at.first : at.end].tolist()
        chosen = [self.samples[index] for index in indices]
        return optimizer_batch(indices, chosen, self.micro_batch_tokens, self.pad_multiple)

    def fingerprint(self) -> dict[str, Any]:
        """See `BatchFeed`."""
        digest = hashlib.sha256()
        for sample in self.samples:
            digest.update(len(sample).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(sample.ids).tobytes())
            digest.update(np.ascontiguousarray(sample.labels).tobytes())
            if sample.segments is not None:
                digest.update(np.ascontiguousarray(sample.segments).tobytes())
        return {
            "samples": len(self.samples),
            "sha256": digest.hexdigest(),
            "batch_samples": self.batch_samples,
            "micro_batch_tokens": self.micro_batch_tokens,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "pad_multiple": self.pad_multiple,
        }

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(len(self.samples))
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(len(self.samples))
