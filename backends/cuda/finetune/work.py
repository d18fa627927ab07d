"""What a loop that serves requests sees of a finetuning job beside it; nothing here imports torch.

A loop asks for the `next_unit`, decides whether there is time for it, and gives it a stream::

    while budget_ms > 0 and (unit := work.next_unit()) is not None and work.ready():
        work.run(unit, stream)            # enqueued, not waited for
        budget_ms -= predicted_ms(unit.kind, work.unit_tokens(unit))

Between any two calls of `run` the loop may pause the job, shrink its window, or give the next unit another stream: the
engine orders its units by events, across streams too. All calls come from one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from harli_core.units import Unit

Status = Literal["running", "paused", "finished", "failed"]


@dataclass(frozen=True, slots=True)
class JobState:
    """Where a job stands and, unless it is running, why it stopped.

    ``step`` of ``max_steps`` optimizer steps are complete, with ``tokens`` training tokens (padding not counted) in them
    since the job first began. ``loss`` is that of the last step whose loss is known on the host, `None` before the
    first; on a GPU it arrives a few units after its step. ``window_layers`` of ``layers`` frozen layers may be resident.
    """

    status: Status
    reason: str | None
    step: int
    max_steps: int
    tokens: int
    loss: float | None
    window_layers: int
    layers: int


@runtime_checkable
class FinetuneWork(Protocol):
    """A finetuning job made of units. No call waits for the GPU, except `close`."""

    @property
    def state(self) -> JobState:
        """Status, reason, progress and window as of now."""
        ...

    def next_unit(self) -> Unit | None:
        """The unit that `run` takes next; `None` unless the job is running.

        Looks, without waiting, whether results of earlier units have arrived: a loss that is not a number fails the job
        here, a checkpoint that could not be written pauses it here.
        """
        ...

    def unit_tokens(self, unit: Unit) -> int:
        """Tokens, padding included, that ``unit`` computes on; 0 for the optimizer."""
        ...

    def ready(self) -> bool:
        """Whether the next unit's frozen layer is resident, so that its stream would not wait for PCIe.

        `False` also starts the copy if it was not under way.
        """
        ...

    def copy_layers(self) -> None:
        """Let copies of frozen layers go on, as far as there is room; cheap, and to be called often."""
        ...

    def run(self, unit: Unit, stream: Any = None, host_ms: float | None = None) -> None:
        """Enqueue ``unit``, which must be `next_unit`, on ``stream`` (a `torch.cuda.Stream`; `None`: the current one).

        ``host_ms`` is what the host has time for (`None`: anything): a graph that should take longer to capture is not
        captured now, and the unit runs kernel by kernel.

        Graphs are captured per stream, so give the same stream object for the same partition each time, and never the
        default stream, on which nothing can be captured.
        """
        ...

    def pause(self, reason: str = "paused on request") -> None:
        """Stop after the units enqueued so far; `next_unit` answers `None` until `resume`."""
        ...

    def resume(self) -> None:
        """Go on from a pause; a checkpoint that could not be written is tried again. Raises `JobError` if the job failed."""
        ...

    def shrink_window(self, layers: int) -> int:
        """Drop layers until at most ``layers`` (not below the minimum of 2) may be resident; returns how many may be.

        Memory goes back to where it came from at once, in stream order: whoever reuses it waits, on the GPU, for the units
        enqueued so far. With shared weights there is no window and nothing happens.
        """
        ...

    def grow_window(self, layers: int) -> int:
        """Let up to ``layers`` layers be resident; returns how many may be, fewer where memory did not suffice."""
        ...

    def close(self) -> None:
        """Wait for units and checkpoint writes under way and free everything; the job can be resumed from its checkpoint."""
        ...
