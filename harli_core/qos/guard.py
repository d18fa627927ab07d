"""The guard: when measured latency breaks the bound that was promised, finetuning pauses for a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class Guard:
    """Pauses finetuning after a step over target that the prediction did not allow for.

    The pause lasts ``cooldown_steps``. Among ``memory_steps`` steps outside pauses, ``tolerated`` such steps may be bad
    luck: each further one says that the prediction is wrong, and doubles the pause, up to ``max_cooldown_steps``. So late
    steps stay well below one in a hundred, whatever the model does, and a rare one costs little.
    """

    def __init__(
        self,
        qos_ms: float,
        cooldown_steps: int = 16,
        max_cooldown_steps: int = 512,
        memory_steps: int = 512,
        tolerated: int = 2,
    ) -> None:
        """``qos_ms`` is the step latency target."""
        self._qos_ms = qos_ms
        self._cooldown_steps = cooldown_steps
        self._max_steps = max_cooldown_steps
        self._memory_steps = memory_steps
        self._tolerated = tolerated
        self._unpaused_steps = 0
        self._late: deque[int] = deque()
        self.paused_steps = 0
        self.trips = 0

    @property
    def paused(self) -> bool:
        """Whether finetuning must wait."""
        return self.paused_steps > 0

    def observe(self, latency_ms: Sequence[float], finetuning: bool) -> None:
        """Take in the steps under one plan; only a plan with finetuning in it can trip the guard."""
        steps = len(latency_ms)
        if self.paused_steps:
            self.paused_steps = max(0, self.paused_steps - steps)
            return
        self._unpaused_steps += steps
        if finetuning and steps and max(latency_ms) > self._qos_ms:
            self._trip()

    def _trip(self) -> None:
        late = self._late
        while late and late[0] <= self._unpaused_steps - self._memory_steps:
            late.popleft()
        doublings = max(0, len(late) + 1 - self._tolerated)
        late.append(self._unpaused_steps)
        self.trips += 1
        self.paused_steps = min(self._max_steps, self._cooldown_steps * 2 ** min(doublings, self._max_steps))
