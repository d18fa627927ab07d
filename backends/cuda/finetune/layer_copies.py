"""Copies of frozen layers to the device: at once, or in pieces of which few are under way at a time.

The GPU copies towards itself in the order in which copies were enqueued, whatever their streams. Where somebody else copies
too, as decoding does for a prompt's slots, a window's worth of layers ahead of that would be a tenth of a second.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

PIECE_BYTES = 32 << 20

BESIDE_DECODE = 3
"""Pieces under way beside decoding: 2 ms at 50 GB/s, for which the host may be busy without the link falling idle."""


class CopyStream(Protocol):
    """Where copies run, in order."""

    def wait(self, event: Any) -> None:
        """What is enqueued from here on runs after ``event``."""
        ...

    def copy(self, to: Any, given: Any) -> None:
        """Enqueue a copy of pinned bytes."""
        ...

    def mark(self) -> Any:
        """An event (``query()`` says whether it has passed) behind what is enqueued."""
        ...


class TorchCopyStream:
    """A CUDA stream."""

    def __init__(self, stream: Any) -> None:
        """Of torch."""
        import torch

        self._torch, self._stream = torch, stream

    def wait(self, event: Any) -> None:
        """See `CopyStream`."""
        self._stream.wait_event(event)

    def copy(self, to: Any, given: Any) -> None:
        """See `CopyStream`."""
        with self._torch.cuda.stream(self._stream):
            to.copy_(given, non_blocking=True)

    def mark(self) -> Any:
        """See `CopyStream`."""
        event = self._torch.cuda.Event()
        event.record(self._stream)
        return event


@dataclass(slots=True, eq=False)
class LayerCopy:
    """One layer on its way; ``loaded``: the mark behind it, `None` until all of it is enqueued."""

    pieces: deque[tuple[Any, Any]]
    after: Any
    loaded: Any = None

    @property
    def over(self) -> bool:
        """Whether the layer is there."""
        return self.loaded is not None and bool(self.loaded.query())


class LayerCopies:
    """Enqueues layers in the order in which they were begun; ``most_pieces`` at a time are under way (`None`: whole layers).

    With a limit somebody has to call `feed` again and again.
    """

    def __init__(self, stream: CopyStream, most_pieces: int | None, piece_bytes: int = PIECE_BYTES) -> None:
        """Nothing is to be copied."""
        self._stream, self._most, self._piece_bytes = stream, most_pieces, piece_bytes
        self._waiting: deque[LayerCopy] = deque()
        self._under_way: deque[Any] = deque()

    def begin(self, to: Any, master: Any, after: Any) -> LayerCopy:
        """Have the bytes of ``master`` copied over those of ``to``, once ``after`` has passed (`None`: at any time)."""
        size = len(master) if self._most is None else self._piece_bytes
        copy = LayerCopy(deque(zip(to.split(size), master.split(size), strict=True)), after)
        self._waiting.append(copy)
        try:
            self.feed()
        except BaseException:
            self.cancel(copy)  # nobody else could: it would keep the slot's memory
            raise
        return copy

    def feed(self) -> None:
        """Enqueue what there is room for."""
        if not self._waiting:
            return
        while self._under_way and self._under_way[0].query():
            self._under_way.popleft()
        while self._waiting and (self._most is None or len(self._under_way) < self._most):
            self._enqueue()

    def finish(self, copy: LayerCopy) -> None:
        """Enqueue all of ``copy``, and what comes before it: somebody is about to wait for its mark."""
        while copy.loaded is None:
            self._enqueue()

    def cancel(self, copy: LayerCopy) -> None:
        """The layer is not wanted any more: leave out what of it is not enqueued."""
        if copy.loaded is None:
            self._waiting.remove(copy)

    def _enqueue(self) -> None:
        copy = self._waiting[0]
        if copy.after is not None:
            self._stream.wait(copy.after)
            copy.after = None
        self._stream.copy(*copy.pieces[0])
        copy.pieces.popleft()  # only now: a piece that could not be enqueued is not there
        mark = self._stream.mark()
        if self._most is not None:
            self._under_way.append(mark)
        if not copy.pieces:
            copy.loaded = mark
            self._waiting.popleft()
