"""Stage 1 (paper, Eq. 2): the decode step alone, one regression for each SM count.

``paper``    ms = c0 + b0*bs + k0*bs*seqlen, with bs*seqlen = KV tokens of the batch.
``stepped``  Eq. 2 + s0*seqlen + sum over knots t of h_t * max(0, bs - t).

GEMM time does not grow evenly with the batch: cuBLAS changes tiles and the tiles fill whole waves of SMs, so on 20 SMs
a step takes 11.6 ms at batch 16, 17.7 at 32 and 19.5 at 48. The knots, at measured batches, follow that; in between the
model is linear in the batch. ``s0*seqlen`` is the attention of batches too small to fill the SMs. For a fixed batch
both bases are one line in the KV tokens, which is what the predictor evaluates.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from harli_core.errors import SampleError
from harli_core.predict.regression import ErrorSummary, LeastSquares, left_out_folds, summarise

SoloBasis = Literal["paper", "stepped"]
SOLO_BASES: tuple[SoloBasis, ...] = ("paper", "stepped")


def launched_batch(batch: int, graph_batches: Sequence[int]) -> int:
    """The size of the decode graph that ``batch`` requests run: the next of ``graph_batches``, if there is one."""
    place = bisect_left(graph_batches, batch)
    return graph_batches[place] if place < len(graph_batches) else batch


@dataclass(frozen=True, slots=True)
class SoloPoint:
    """The median of one measured decode step."""

    sms: int
    batch: int
    kv_tokens: int
    ms: float


@dataclass(frozen=True, slots=True)
class SoloModel:
    """Fitted Eq. 2. ``coefficients[i]`` belongs to ``sms[i]``: c0, b0, k0 and, if stepped, s0 and one a knot.

    ``batch_max`` is the largest measured batch. Beyond it the stepped basis lets the part that does not depend on KV
    grow in proportion to the batch (compute-bound GEMMs), because the slope of its last piece may be anything.
    """

    basis: SoloBasis
    knots: tuple[int, ...]
    batch_max: int
    sms: tuple[int, ...]
    coefficients: tuple[tuple[float, ...], ...]

    def line(self, sms: int, batch: int) -> tuple[float, float]:
        """(ms at no KV, ms a KV token) of a batch of at least 1 on ``sms`` SMs, which must be one of the fitted."""
        found = self.coefficients[self.sms.index(sms)]
        if self.basis == "paper":
            return found[0] + found[1] * batch, found[2]
        inside = min(batch, self.batch_max)
        fixed_ms = found[0] + found[1] * inside
        for knot, bend in zip(self.knots, found[4:], strict=True):
            fixed_ms += bend * max(0, inside - knot)
        return fixed_ms * (batch / inside), found[2] + found[3] / batch

    def predict_ms(self, sms: int, batch: int, kv_tokens: int) -> float:
        """Predicted duration of one decode step."""
        fixed_ms, token_ms = self.line(sms, batch)
        return fixed_ms + token_ms * kv_tokens


def _row(point: SoloPoint, basis: SoloBasis, knots: Sequence[int]) -> list[float]:
    row = [1.0, float(point.batch), float(point.kv_tokens)]
    if basis == "stepped":
        row.append(point.kv_tokens / point.batch)
        row.extend(float(max(0, point.batch - knot)) for knot in knots)
    return row


def fit_solo(points: Sequence[SoloPoint], basis: SoloBasis, solve: LeastSquares) -> SoloModel:
    """Fit one basis. Knots are the batches measured on every SM count, without the two smallest and the largest.

    Raises `SampleError` when there are too few batches or contexts to tell the terms apart.
    """
    sms = tuple(sorted({point.sms for point in points}))
    cells = {(point.sms, point.batch) for point in points}
    batches = sorted(b for b in {point.batch for point in points} if all((count, b) in cells for count in sms))
    knots = tuple(batches[2:-1]) if basis == "stepped" else ()
    if len(batches) < 3:
        raise SampleError(f"decode_solo: {len(batches)} batch sizes measured on every SM count, need at least 3")
    found: list[tuple[float, ...]] = []
    for count in sms:
        at = [point for point in points if point.sms == count]
        if len({point.kv_tokens / point.batch for point in at}) < 2:
            raise SampleError(f"decode_solo: only one context length was measured on {count} SMs, need at least 2")
        found.append(solve([_row(point, basis, knots) for point in at], [point.ms for point in at]))
    return SoloModel(basis, knots, max(point.batch for point in points), sms, tuple(found))


def solo_errors(model: SoloModel, points: Sequence[SoloPoint]) -> ErrorSummary:
    """Relative errors of ``model`` on ``points``."""
    return summarise([model.predict_ms(p.sms, p.batch, p.kv_tokens) for p in points], [p.ms for p in points])


def solo_left_out(
    points: Sequence[SoloPoint], basis: SoloBasis, solve: LeastSquares, group: Callable[[SoloPoint], Hashable]
) -> ErrorSummary:
    """Relative errors on groups of points that the fit has not seen; its knots come from the rest as well."""
    predicted: list[float] = []
    measured: list[float] = []
    for rest, out in left_out_folds(points, group):
        model = fit_solo(rest, basis, solve)
        predicted.extend(model.predict_ms(p.sms, p.batch, p.kv_tokens) for p in out)
        measured.extend(p.ms for p in out)
    return summarise(predicted, measured)
