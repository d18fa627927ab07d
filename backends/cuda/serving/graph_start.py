"""Where a decode graph begins: behind a unit of finetuning, on the GPU, and marked; its preparation waits for nothing."""

from __future__ import annotations

from typing import Any

from backends.cuda.serving.timeline import Timeline


class GraphStart:
    """Takes the place of ``backend.replay`` of SGLang's decode graphs; ``backend`` of `None`: steps have no graph."""

    def __init__(self, timeline: Timeline, stream: Any, backend: Any | None) -> None:
        """``stream`` is where graphs are replayed (`None` on a CPU)."""
        self.began_ms = 0.0
        """When, on the host, the last graph was enqueued."""
        self._timeline = timeline
        self._stream = stream
        self._behind: Any = None
        self._begin: Any = None
        self._has_graphs = backend is not None
        if backend is not None:
            self._replay = backend.replay
            backend.replay = self._behind_a_unit

    def before(self, behind: Any) -> None:
        """A step is about to be prepared, whose graph is to wait for the mark ``behind`` (`None`: for nothing)."""
        self._behind = behind
        self._mark(waits=not self._has_graphs)

    @property
    def begin(self) -> Any:
        """The mark right before the last graph; where SGLang ran a batch without one, before the whole step."""
        return self._begin

    def _behind_a_unit(self, *arguments: Any, **options: Any) -> Any:
        self._mark(waits=True)
        return self._replay(*arguments, **options)

    def _mark(self, *, waits: bool) -> None:
        if waits and self._behind is not None and self._stream is not None:
            self._stream.wait_event(self._behind)
        self._begin, self.began_ms = self._timeline.mark(self._stream), self._timeline.now_ms()
