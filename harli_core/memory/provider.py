"""The port to whatever holds the bytes: real memory in a backend, nothing but counts in a simulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from harli_core.memory.geometry import GridGeometry


@dataclass(frozen=True, slots=True)
class ProviderCapabilities:
    """What a provider can do.

    ``aliasing``: both views are mapped at once, so that lending is bookkeeping; otherwise a row is remapped, which
    takes ``remap_row_ms``.
    """

    name: str
    aliasing: bool
    remap_row_ms: float


class PageProvider(Protocol):
    """Physical memory of a grid. Each call happens at a step boundary; one that raises has changed nothing.

    Order of calls: ``reserve`` once, ``commit_row`` for every row, then ``lend_row`` and ``return_row`` alternating for
    each row, ``release`` at the end (any state, more than once).
    """

    @property
    def capabilities(self) -> ProviderCapabilities:
        """What this provider can do."""
        ...

    def reserve(self, geometry: GridGeometry) -> None:
        """Reserve the virtual ranges of both views; physical blocks may be taken here already."""
        ...

    def commit_row(self, row: int) -> None:
        """Back ``row`` with physical blocks, readable through the KV view."""
        ...

    def lend_row(self, row: int) -> None:
        """Make ``row`` usable through the general-purpose view."""
        ...

    def return_row(self, row: int) -> None:
        """Make ``row`` usable through the KV view again, its content such that no masked read meets a NaN."""
        ...

    def release(self) -> None:
        """Give everything back."""
        ...
