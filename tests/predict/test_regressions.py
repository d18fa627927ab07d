"""The three stages recover the equations that data were drawn from, and cross-validation prefers the true form."""

from __future__ import annotations

import pytest

from harli_core.errors import SampleError
from harli_core.predict.colocated import ColocatedModel, ColocatedPoint, colocated_left_out, fit_colocated
from harli_core.predict.finetune import UnitModel, UnitPoint, fit_unit, forms_for
from harli_core.predict.fit import least_squares
from harli_core.predict.regression import left_out_folds, quantiles, summarise
from harli_core.predict.solo import SoloModel, SoloPoint, fit_solo, solo_errors, solo_left_out

BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (256, 1024, 4096)
SMS = (20, 132)
PAPER = SoloModel("paper", (), 256, SMS, ((10.0, 0.12, 6e-5), (4.7, 0.02, 3e-5)))
STEPPED = SoloModel(
    "stepped",
    (8, 16, 32, 64, 128),
    256,
    SMS,
    ((10.0, 0.05, 6e-5, 1e-4, 0.02, 0.3, -0.25, 0.1, -0.05), (4.7, 0.02, 3e-5, 1e-4, 0.0, 0.02, -0.01, 0.01, 0.02)),
)


def drawn_from(model: SoloModel) -> list[SoloPoint]:
    """Points exactly on ``model``."""
    return [
        SoloPoint(sms, batch, batch * context, model.predict_ms(sms, batch, batch * context))
        for sms in SMS
        for batch in BATCHES
        for context in CONTEXTS
    ]


@pytest.mark.parametrize("truth", [PAPER, STEPPED], ids=["paper", "stepped"])
def test_eq_2_is_recovered_exactly(truth: SoloModel) -> None:
    """Fitting points on the equation gives its coefficients back, for each SM count."""
    found = fit_solo(drawn_from(truth), truth.basis, least_squares())
    assert (found.basis, found.knots, found.batch_max, found.sms) == (truth.basis, truth.knots, 256, SMS)
    for row, expected in zip(found.coefficients, truth.coefficients, strict=True):
        assert row == pytest.approx(expected, rel=1e-7, abs=1e-9)


def test_paper_basis_is_eq_2_term_by_term() -> None:
    """ms = c0 + b0*bs + k0*bs*seqlen, at any batch, also beyond the measured ones."""
    c0, b0, k0 = PAPER.coefficients[0]
    assert PAPER.predict_ms(20, 700, 700 * 900) == pytest.approx(c0 + b0 * 700 + k0 * 700 * 900)


def test_stepped_basis_is_continuous_and_extends_in_proportion() -> None:
    """No jump at the largest measured batch; beyond it the part without KV grows as the batch does."""
    at, after, twice = (STEPPED.line(20, batch)[0] for batch in (256, 257, 512))
    assert after - at == pytest.approx(at / 256)
    assert twice == pytest.approx(2 * at)


def test_left_out_batches_favour_the_basis_that_is_true() -> None:
    """Cross-validation sees a bend that Eq. 2 has not, and no advantage of the bends where Eq. 2 is exact."""
    solve = least_squares()
    by_batch = [
        [solo_left_out(drawn_from(truth), basis, solve, lambda p: p.batch).mean for basis in ("paper", "stepped")]
        for truth in (PAPER, STEPPED)
    ]
    assert by_batch[0][0] < 1e-9
    assert by_batch[1][1] < by_batch[1][0]
    assert solo_errors(PAPER, drawn_from(PAPER)).max == 0.0


def test_too_few_batches_or_contexts_are_an_error() -> None:
    """Terms that the data cannot tell apart are refused, not guessed."""
    points = drawn_from(PAPER)
    with pytest.raises(SampleError, match="need at least 3"):
        fit_solo([p for p in points if p.batch < 8], "stepped", least_squares())
    with pytest.raises(SampleError, match="only one context length was measured on 20 SMs"):
        fit_solo([p for p in points if p.kv_tokens == 256 * p.batch], "paper", least_squares())


def co_runs(truth: ColocatedModel, whole_chip: bool) -> list[ColocatedPoint]:
    """Slowdowns exactly on ``truth``; shares add up to 1 on the whole chip, and to less otherwise."""
    splits = [
        (0.1 * i, 0.1 * j) for i in range(1, 10) for j in range(1, 10) if i + j == 10 or (i + j < 10 and not whole_chip)
    ]
    return [ColocatedPoint(i, f, b, 1024 * b, truth.slowdown(i, f)) for i, f in splits for b in (8, 64)]


@pytest.mark.parametrize(
    "truth",
    [
        ColocatedModel("paper", (1.0, 1.4)),
        ColocatedModel("intercept", (0.15, 0.44, 0.94)),
        ColocatedModel("saturating", (0.99, 0.41)),
    ],
    ids=lambda model: model.form,
)
def test_eq_3_is_recovered_exactly(truth: ColocatedModel) -> None:
    """Fitting the 45 pairs i + j <= 10 gives the coefficients back, and the true form has no error left out."""
    points = co_runs(truth, whole_chip=False)
    assert fit_colocated(points, truth.form, least_squares()).coefficients == pytest.approx(
        truth.coefficients, rel=1e-9
    )
    assert colocated_left_out(points, truth.form, least_squares(), lambda p: p.infer_share).max < 1e-9


def test_intercept_is_no_new_model_where_splits_use_the_whole_chip() -> None:
    """With sm_infer + sm_ft constant, Eq. 3 as printed reproduces one with an intercept."""
    points = co_runs(ColocatedModel("intercept", (0.15, 0.44, 0.94)), whole_chip=True)
    found = fit_colocated(points, "paper", least_squares())
    assert found.slowdown(0.3, 0.7) == pytest.approx(0.15 * 0.3 + 0.44 * 0.7 + 0.94)


@pytest.mark.parametrize(
    "truth",
    [
        UnitModel("forward", "proportional", (1e-4, 0.08)),
        UnitModel("forward", "affine", (1e-4, 0.08, 0.05)),
        UnitModel("forward", "wide", (1e-4, 0.08, 2e-6)),
        UnitModel("optimizer", "fixed", (0.1, 1.2)),
    ],
    ids=lambda model: model.form,
)
def test_unit_durations_are_recovered_exactly(truth: UnitModel) -> None:
    """Each form gives its own coefficients back."""
    points = [UnitPoint(t, s, truth.predict_ms(t, s)) for t in (1024, 2048) for s in (16, 48, 80, 112, 132)]
    assert truth.form in forms_for(truth.kind, points)
    assert fit_unit(truth.kind, points, truth.form, least_squares()).coefficients == pytest.approx(
        truth.coefficients, rel=1e-8
    )


def test_folds_quantiles_and_summary() -> None:
    """Each group is left out once; quantiles reach from minimum to maximum; errors are relative."""
    assert left_out_folds([1, 2, 11, 12], lambda p: p // 10) == [([11, 12], [1, 2]), ([1, 2], [11, 12])]
    assert quantiles([3.0, 1.0, 2.0], 5) == (1.0, 1.5, 2.0, 2.5, 3.0)
    assert quantiles([7.0], 3) == (7.0, 7.0, 7.0)
    summary = summarise([1.1, 2.0], [1.0, 2.0])
    assert summary.count == 2
    assert (summary.mean, summary.max) == pytest.approx((0.05, 0.1))
