"""What a trace may say of its requests beside arrival and lengths: names (session, class) and prefix hashes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """One name or none for each request: ``codes[i]`` points into ``names``, -1 stands for none."""

    codes: NDArray[np.int32]
    names: tuple[str, ...]

    @classmethod
    def of(cls, values: Iterable[str | None]) -> Self:
        """Number the names in the order in which they appear."""
        numbers: dict[str, int] = {}
        codes = [-1 if value is None else numbers.setdefault(value, len(numbers)) for value in values]
        return cls(np.array(codes, dtype=np.int32), tuple(numbers))

    def take(self, index: NDArray[np.int64]) -> Labels:
        """The labels of chosen requests, in the order chosen."""
        return Labels(self.codes[index], self.names)

    def values(self) -> list[str | None]:
        """Spell the labels out."""
        return [None if code < 0 else self.names[code] for code in self.codes.tolist()]

    def same(self, other: Labels) -> bool:
        """Whether every request has the same name in both, however they are numbered."""
        return self.values() == other.values()


@dataclass(frozen=True, slots=True, eq=False)
class PrefixHashes:
    """The hashes of each request's prefix blocks: those of request i are ``ids[offsets[i]:offsets[i + 1]]``."""

    offsets: NDArray[np.int64]
    ids: NDArray[np.int64]

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Self:
        """Put lists of hashes one behind the other."""
        offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        ids = np.fromiter((one for hashes in lists for one in hashes), dtype=np.int64, count=int(offsets[-1]))
        return cls(offsets, ids)

    def take(self, index: NDArray[np.int64]) -> PrefixHashes:
        """The hashes of chosen requests, in the order chosen."""
        starts, counts = self.offsets[index], self.offsets[index + 1] - self.offsets[index]
        offsets = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
        within = np.arange(int(offsets[-1]), dtype=np.int64) - np.repeat(offsets[:-1], counts)
        return PrefixHashes(offsets, self.ids[np.repeat(starts, counts) + within])

    def lists(self) -> list[list[int]]:
        """Spell the hashes out, a list a request."""
        bounds = self.offsets.tolist()
        return [self.ids[start:end].tolist() for start, end in pairwise(bounds)]

    def same(self, other: PrefixHashes) -> bool:
        """Whether every request has the same hashes in both."""
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.ids, other.ids)
