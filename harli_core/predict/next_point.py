"""Which operating point to measure next: the one about which the solo predictor is least sure.

Unsure is what changes when a part of the evidence is left out: for each measured batch size the model is fitted without
it (jackknife), and a point's uncertainty is how far these models disagree there. Between batches where a step's time
bends they disagree, on a stretch that is straight they do not, so points go where GEMMs change tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harli_core.errors import SampleError
from harli_core.predict.regression import LeastSquares, left_out_folds
from harli_core.predict.solo import SoloModel, SoloPoint, fit_solo


@dataclass(frozen=True, slots=True, order=True)
class OperatingPoint:
    """``batch`` requests of ``context_tokens`` tokens each."""

    batch: int
    context_tokens: int

    @property
    def kv_tokens(self) -> int:
        """Tokens of all of them."""
        return self.batch * self.context_tokens


@dataclass(frozen=True, slots=True)
class Choice:
    """The next point, and how unsure the predictor is there: relative, the worst of all SM counts."""

    point: OperatingPoint
    uncertainty: float


def next_point(
    measured: Sequence[SoloPoint], candidates: Sequence[OperatingPoint], solve: LeastSquares
) -> Choice | None:
    """The candidate of the largest uncertainty; the first of equal ones. `None` without candidates.

    Raises `SampleError` where there is too little to leave anything out: five batch sizes, two contexts.
    """
    if not candidates:
        return None
    models = _jackknife(measured, solve)
    best: Choice | None = None
    for point in candidates:
        found = Choice(point, _disagreement(models, point))
        if best is None or found.uncertainty > best.uncertainty:
            best = found
    return best


def _jackknife(measured: Sequence[SoloPoint], solve: LeastSquares) -> list[SoloModel]:
    """The model of all points first, then one without each batch size that the others can do without."""
    models = [fit_solo(measured, "stepped", solve)]
    for rest, _ in left_out_folds(measured, lambda point: point.batch):
        try:
            models.append(fit_solo(rest, "stepped", solve))
        except SampleError:
            continue
    if len(models) < 3:
        raise SampleError("decode_solo: too few batch sizes to tell where the predictor is unsure, need at least 5")
    return models


def _disagreement(models: Sequence[SoloModel], point: OperatingPoint) -> float:
    """Root mean square distance of the jackknife models from the model of everything, relative to it."""
    whole, *others = models
    worst = 0.0
    for sms in whole.sms:
        expected_ms = whole.predict_ms(sms, point.batch, point.kv_tokens)
        apart = [
            model.predict_ms(sms, point.batch, point.kv_tokens) / expected_ms - 1.0
            for model in others
            if expected_ms > 0.0
        ]
        if apart:
            worst = max(worst, (sum(value * value for value in apart) / len(apart)) ** 0.5)
    return worst
