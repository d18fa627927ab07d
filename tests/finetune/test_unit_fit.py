"""How much goes into a unit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backends.cuda.finetune.unit_fit import ROWS, SAFETY, UnitFit, fit_units
from tests.finetune.tiny import gradients, recipe, run_all, tiny_engine, tiny_feed, tiny_peft, worst_difference


@given(row_ms=st.floats(0.01, 20), token_ms=st.floats(1e-5, 0.1), unit_ms=st.floats(1, 20))
def test_the_most_rows_that_keep_to_unit_ms(row_ms: float, token_ms: float, unit_ms: float) -> None:
    """With work in proportion to rows, the next larger micro-batch would be too long; head parts are short enough."""
    fit = UnitFit.of(unit_ms, 512, lambda rows: rows * row_ms, lambda tokens: tokens * token_ms)
    limit = unit_ms * SAFETY
    assert fit.rows == max([rows for rows in ROWS if rows * row_ms <= limit], default=1)
    assert fit.kept == (fit.rows * row_ms <= unit_ms)
    assert fit.head_ms / fit.head_parts <= limit * (1 + 1e-9)
    assert fit.micro_batch_tokens == fit.rows * 512


def test_a_fitted_job_trains_the_same() -> None:
    """Measuring before the first step leaves no trace, and the cut that comes of it changes no gradient."""
    feed = tiny_feed(8, 1)
    engine = tiny_engine(tiny_peft(), feed, recipe(2), window_layers=2)
    fit = fit_units(engine, feed, 1000.0, 24)
    assert fit.kept
    assert feed.micro_batch_tokens == fit.micro_batch_tokens > 24
    expected = gradients(tiny_engine(tiny_peft(), tiny_feed(8, 1), recipe(2)))
    assert worst_difference(gradients(engine), expected) < 1e-9
    run_all(engine)
    assert engine.state.status == "finished"
