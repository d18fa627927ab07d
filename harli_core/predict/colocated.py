"""Stage 2 (paper, Eq. 3): how much finetuning beside it slows a decode step, one regression for all splits.

``paper``       colo_ms = (b1*sm_infer + k1*sm_ft) * solo_ms(sm_infer), SMs as shares of the chip
``intercept``   ... + a1 in the brackets
``saturating``  colo_ms = (a1 + k1*min(sm_ft, 0.6)) * solo_ms(sm_infer)

Where every split uses the whole chip, sm_infer + sm_ft = 1 and the first two are the same model; the tie goes to the
paper. On an H200 the slowdown stops growing near 80 of 132 SMs (finetuning is held back by power and bandwidth there),
which is what the third form says with as many coefficients as the first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from harli_core.predict.regression import ErrorSummary, LeastSquares, dot, left_out_folds, summarise

ColocatedForm = Literal["paper", "intercept", "saturating"]
COLOCATED_FORMS: tuple[ColocatedForm, ...] = ("paper", "intercept", "saturating")
SATURATION_SHARE = 0.6
"""Share of the chip beyond which more SMs for finetuning no longer slow decode."""


@dataclass(frozen=True, slots=True)
class ColocatedPoint:
    """One measured co-run: shares of the chip, and decode beside finetuning over decode alone."""

    infer_share: float
    finetune_share: float
    batch: int
    kv_tokens: int
    slowdown: float


@dataclass(frozen=True, slots=True)
class ColocatedModel:
    """Fitted Eq. 3; coefficients in the order of the module's formulas (b1, k1 / b1, k1, a1 / a1, k1)."""

    form: ColocatedForm
    coefficients: tuple[float, ...]

    def slowdown(self, infer_share: float, finetune_share: float) -> float:
        """Factor on the step's solo time; the shares are of the whole chip."""
        return dot(self.coefficients, _row(infer_share, finetune_share, self.form))


def _row(infer_share: float, finetune_share: float, form: ColocatedForm) -> tuple[float, ...]:
    if form == "paper":
        return infer_share, finetune_share
    if form == "intercept":
        return infer_share, finetune_share, 1.0
    return 1.0, min(finetune_share, SATURATION_SHARE)


def fit_colocated(points: Sequence[ColocatedPoint], form: ColocatedForm, solve: LeastSquares) -> ColocatedModel:
    """Fit one form."""
    rows = [_row(point.infer_share, point.finetune_share, form) for point in points]
    return ColocatedModel(form, solve(rows, [point.slowdown for point in points]))


def colocated_errors(model: ColocatedModel, points: Sequence[ColocatedPoint]) -> ErrorSummary:
    """Relative errors of ``model``, given the measured solo time."""
    predicted = [model.slowdown(point.infer_share, point.finetune_share) for point in points]
    return summarise(predicted, [point.slowdown for point in points])


def colocated_left_out(
    points: Sequence[ColocatedPoint],
    form: ColocatedForm,
    solve: LeastSquares,
    group: Callable[[ColocatedPoint], Hashable],
) -> ErrorSummary:
    """Relative errors on groups (splits, say) that the fit has not seen."""
    predicted: list[float] = []
    measured: list[float] = []
    for rest, out in left_out_folds(points, group):
        model = fit_colocated(rest, form, solve)
        predicted.extend(model.slowdown(point.infer_share, point.finetune_share) for point in out)
        measured.extend(point.slowdown for point in out)
    return summarise(predicted, measured)
