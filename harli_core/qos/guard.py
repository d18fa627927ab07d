"""The guard: when measured latency breaks the bound that was promised, finetuning pauses for a while."""

from __future__ import annotations

from collections.abc import Sequence


class Guard:
    """Pauses finetuning after a step over target that the prediction did not allow for.

    The pause lasts ``cooldown_steps``, doubled each time the model fails again within ``calm_steps`` of the last pause
    (up to ``max_cooldown_steps``) and back to the start after a calm stretch: hysteresis, so that it does not flap.
    """

    def __init__(
        self, qos_ms: float, cooldown_steps: int = 16, max_cooldown_steps: int = 512, calm_steps: int = 2048
    ) -> None:
        """``qos_ms`` is the step latency target."""
        self._qos_ms = qos_ms
        self._base_steps = cooldown_steps
        self._max_steps = max_cooldown_steps
        self._calm_steps = calm_steps
        self._next_pause_steps = cooldown_steps
        self._since_pause_steps = calm_steps
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
        self._since_pause_steps += steps
        if self._since_pause_steps >= self._calm_steps:
            self._next_pause_steps = self._base_steps
        if finetuning and steps and max(latency_ms) > self._qos_ms:
            self.trips += 1
            self.paused_steps = self._next_pause_steps
            self._next_pause_steps = min(self._max_steps, 2 * self._next_pause_steps)
            self._since_pause_steps = 0
