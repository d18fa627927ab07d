"""Stage 3 (ours): how long a finetune unit takes on n SMs, alone and beside decode.

Alone, one regression a unit kind, in one of four forms:

``proportional``  a*tokens + p*tokens/sms
``affine``        a*tokens + p*tokens/sms + c
``wide``          a*tokens + p*tokens/sms + w*tokens*sms     (more SMs gain less on a wide partition)
``fixed``         c + p/sms                                  (the optimizer, which sees no tokens)

Head and loss were measured at 1,024 tokens only: the loss is computed in chunks of that size, so its forms are
proportional to the tokens. Beside decode a unit takes a factor longer that depends on the split alone: it is fitted to
what was measured beside decode over what the model says of it alone, so that an error of the model on one SM count is
not carried to the choice between splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harli_core.predict.regression import ErrorSummary, LeastSquares, dot, left_out_folds, summarise
from harli_core.types import UnitKind

UnitForm = Literal["proportional", "affine", "wide", "fixed"]
UNIT_FORMS: tuple[UnitForm, ...] = ("proportional", "affine", "wide", "fixed")


@dataclass(frozen=True, slots=True)
class UnitPoint:
    """The median of one measured finetune unit, alone on ``sms`` SMs."""

    tokens: int
    sms: int
    ms: float


@dataclass(frozen=True, slots=True)
class UnitModel:
    """Fitted duration of one unit kind; coefficients in the order of the module's formulas."""

    kind: UnitKind
    form: UnitForm
    coefficients: tuple[float, ...]

    def predict_ms(self, tokens: int, sms: int) -> float:
        """Predicted duration of one unit, alone."""
        return dot(self.coefficients, _row(tokens, sms, self.form))


def pair_ms(units: Sequence[UnitModel], tokens: int, sms: int) -> float:
    """Predicted duration of one forward and one backward unit, alone."""
    return sum(unit.predict_ms(tokens, sms) for unit in units if unit.kind in ("forward", "backward"))


@dataclass(frozen=True, slots=True)
class FinetuneModel:
    """The four unit kinds, and ``beside``: how much longer than that a unit takes beside decode, one factor a split."""

    units: tuple[UnitModel, ...]
    beside: tuple[float, ...]

    def unit(self, kind: UnitKind) -> UnitModel:
        """The model of one kind."""
        return next(unit for unit in self.units if unit.kind == kind)


def _row(tokens: int, sms: int, form: UnitForm) -> tuple[float, ...]:
    if form == "fixed":
        return 1.0, 1.0 / sms
    if form == "proportional":
        return float(tokens), tokens / sms
    if form == "affine":
        return float(tokens), tokens / sms, 1.0
    return float(tokens), tokens / sms, float(tokens) * sms


def forms_for(kind: UnitKind, points: Sequence[UnitPoint]) -> tuple[UnitForm, ...]:
    """The forms that measurements of this kind can tell apart."""
    if kind == "optimizer":
        return ("fixed",)
    if len({point.tokens for point in points}) < 2:
        return ("proportional", "wide")
    return ("proportional", "affine", "wide")


def fit_unit(kind: UnitKind, points: Sequence[UnitPoint], form: UnitForm, solve: LeastSquares) -> UnitModel:
    """Fit one form of one kind."""
    rows = [_row(point.tokens, point.sms, form) for point in points]
    return UnitModel(kind, form, solve(rows, [point.ms for point in points]))


def unit_errors(model: UnitModel, points: Sequence[UnitPoint]) -> ErrorSummary:
    """Relative errors of ``model`` on ``points``."""
    return summarise([model.predict_ms(p.tokens, p.sms) for p in points], [p.ms for p in points])


def unit_left_out(kind: UnitKind, points: Sequence[UnitPoint], form: UnitForm, solve: LeastSquares) -> ErrorSummary:
    """Relative errors on SM counts that the fit has not seen."""
    predicted: list[float] = []
    measured: list[float] = []
    for rest, out in left_out_folds(points, lambda point: point.sms):
        model = fit_unit(kind, rest, form, solve)
        predicted.extend(model.predict_ms(point.tokens, point.sms) for point in out)
        measured.extend(point.ms for point in out)
    return summarise(predicted, measured)
