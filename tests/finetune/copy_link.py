"""A stream of copies that goes on when it is told to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class Mark:
    """Passes when the link comes to it."""

    def __init__(self) -> None:
        """Not yet."""
        self.passed = False

    def query(self) -> bool:
        """As a CUDA event has it."""
        return self.passed


@dataclass
class Link:
    """Does what is enqueued when it is told to; a wait for a mark that has not passed holds up what comes after it."""

    queue: list[tuple[str, Any, Any]] = field(default_factory=list)

    def wait(self, event: Mark) -> None:
        """See `CopyStream`."""
        self.queue.append(("wait", event, None))

    def copy(self, to: Any, given: Any) -> None:
        """See `CopyStream`."""
        self.queue.append(("copy", to, given))

    def mark(self) -> Mark:
        """See `CopyStream`."""
        made = Mark()
        self.queue.append(("mark", made, None))
        return made

    @property
    def pieces(self) -> int:
        """Copies that are enqueued and not done."""
        return sum(what == "copy" for what, _, _ in self.queue)

    def go(self, pieces: int = 1000) -> None:
        """Do up to so many copies, with what lies before and right behind them."""
        while self.queue:
            what, first, second = self.queue[0]
            if (what == "copy" and not pieces) or (what == "wait" and not first.passed):
                return
            self.queue.pop(0)
            if what == "copy":
                first.copy_(second)
                pieces -= 1
            elif what == "mark":
                first.passed = True
