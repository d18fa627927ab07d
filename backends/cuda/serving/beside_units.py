"""How long units really take beside decode, for policies that choose a split by it."""

from __future__ import annotations

from backends.cuda.serving.unit_times import UnitTimes
from harli_core.predict.predictor import StepPredictor
from harli_core.types import UnitKind

PAIR: tuple[UnitKind, ...] = ("forward", "backward")
"""What finetuning beside decode is reckoned in."""


class BesideUnits:
    """Measured over predicted durations of one forward and one backward unit, since the last look.

    `UnitTimes` does not say what a unit ran beside: `skip` those that had nothing beside them.
    """

    def __init__(self, times: UnitTimes, predictor: StepPredictor, unit_tokens: int) -> None:
        """``times`` are those of the job's units, of ``unit_tokens`` tokens each; units of before do not count."""
        self._times = times
        self._predictor = predictor
        self._unit_tokens = unit_tokens
        self._indices = {split.finetune_sms: index for index, split in enumerate(predictor.profile.splits)}
        self._seen: dict[tuple[UnitKind, int], tuple[int, float]] = {}
        self.skip()

    def skip(self) -> None:
        """Units that ended since the last look ran without decode beside them: they say nothing."""
        for key, times in self._times.run.items():
            self._seen[key] = (times.count, times.total_ms)

    def ratio(self, finetune_sms: int) -> float | None:
        """Of the units that ended on a split's SMs since this was asked; `None` before there is one of each kind."""
        index = self._indices.get(finetune_sms)
        if index is None:
            return None
        measured_ms = 0.0
        for kind in PAIR:
            count, total_ms = self._since(kind, finetune_sms)
            if not count:
                return None
            measured_ms += total_ms / count
        for kind in PAIR:
            times = self._times.run[kind, finetune_sms]
            self._seen[kind, finetune_sms] = (times.count, times.total_ms)
        predicted_ms = sum(self._predictor.unit_beside_ms(kind, self._unit_tokens, index) for kind in PAIR)
        return measured_ms / predicted_ms

    def _since(self, kind: UnitKind, sms: int) -> tuple[int, float]:
        """Units and their time that were not seen yet; `UnitTimes` may have been cleared in between."""
        times = self._times.run.get((kind, sms))
        if times is None:
            return 0, 0.0
        count, total_ms = self._seen.get((kind, sms), (0, 0.0))
        if times.count < count:
            count, total_ms = 0, 0.0
        return times.count - count, times.total_ms - total_ms
