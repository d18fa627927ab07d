"""Profiling within a time budget, on a device that is a formula and a clock that is a number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import mean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.cuda.serving.profiler import QUICK, Profiler
from harli_cli.package_data import shipped_samples
from harli_core.errors import SampleError
from harli_core.predict.fit import fit_profile, least_squares, solo_points
from harli_core.predict.next_point import OperatingPoint, next_point
from harli_core.predict.samples import parse_samples
from harli_core.predict.solo import SoloPoint, fit_solo, solo_errors
from harli_core.types import Split, UnitKind

DEVICE = {"gpu": "a formula", "driver": 13000, "torch": "2.13", "model": "llama3-8b", "layers": 32}
KINDS: tuple[UnitKind, ...] = ("forward", "head_loss", "backward", "optimizer")


class FormulaBench:
    """Implements `Bench`: a step takes longer from batch to batch in stairs; every call moves the clock on by its cost."""

    splits: Sequence[Split] = (Split(20, 112), Split(68, 64), Split(116, 16))
    total_sms = 132
    unit_tokens = 1024

    def __init__(self, slow: float) -> None:
        """``slow`` times as long as the GPU that the formula was thought of for."""
        self.slow, self.now_s = slow, 0.0
        self._batch = self._kv_tokens = 0

    def clock_s(self) -> float:
        """The time."""
        return self.now_s

    def put_in_place(self, batch: int, context_tokens: int, steps: int) -> None:
        """See `Bench`."""
        self._batch, self._kv_tokens = batch, batch * context_tokens
        self._spend(200.0)

    def decode(self, split: Split | None, steps: int) -> list[float]:
        """See `Bench`."""
        sms = self.total_sms if split is None else split.decode_sms
        stairs = -(-self._batch // 32) * 32
        ms = (4.0 + 0.02 * stairs + 2e-5 * self._kv_tokens) * (132 / sms) ** 0.5 * self.slow
        return self._spent(ms, steps)

    def decode_beside(self, split: Split, steps: int) -> tuple[list[float], float]:
        """See `Bench`."""
        return [1.2 * ms for ms in self.decode(split, steps)], 1.1

    def units(self, split: Split | None, repeats: int) -> dict[UnitKind, list[float]]:
        """See `Bench`."""
        sms = self.total_sms if split is None else split.finetune_sms
        return {kind: self._spent(1.5 * 132 / sms * self.slow, repeats) for kind in KINDS}

    def prefill(self, tokens: int) -> float:
        """See `Bench`."""
        return self._spent(0.03 * tokens * self.slow, 1)[0]

    def _spent(self, ms: float, count: int) -> list[float]:
        self._spend(ms * count)
        return [ms] * count

    def _spend(self, ms: float) -> None:
        self.now_s += ms / 1e3


def profile(slow: float) -> tuple[FormulaBench, Profiler, list[dict[str, Any]]]:
    """All lines of a device ``slow`` times as slow."""
    bench = FormulaBench(slow)
    profiler = Profiler(bench, QUICK, bench.clock_s)
    return bench, profiler, list(profiler.lines(DEVICE, "llama3-8b"))


@settings(max_examples=20)
@given(st.floats(0.2, 4.0))
def test_budget_is_kept_and_a_profile_can_be_fitted(slow: float) -> None:
    """However slow the device: within the budget, every corner measured, no point twice, and `harli fit` takes it."""
    bench, profiler, lines = profile(slow)
    assert bench.now_s <= QUICK.budget_s
    assert profiler.measured[: len(QUICK.corners)] == list(QUICK.corners)
    assert len(set(profiler.measured)) == len(profiler.measured)
    fitted = fit_profile(parse_samples([json.dumps(line) for line in lines], "a formula"), "llama3-8b")
    assert fitted.splits == tuple(bench.splits)
    assert {line["kind"] for line in lines} == {
        "device", "finetune_unit", "prefill", "decode_sequence", "colocated_sequence", "decode_solo", "colocated",
    }  # fmt: skip


def test_slower_devices_get_fewer_points() -> None:
    """The budget decides how many points there are, and a fast device ends when the predictor is sure."""
    counts = [len(profile(slow)[1].measured) for slow in (1.0, 10.5, 11.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] >= len(QUICK.corners)


def test_batches_have_two_contexts_where_candidates_allow_it() -> None:
    """The simulator draws a line between two contexts of a batch; with one it would know nothing of KV."""
    _, profiler, _ = profile(1.0)
    contexts = {point.batch: 0 for point in profiler.measured}
    for point in profiler.measured:
        contexts[point.batch] += 1
    alone = [batch for batch, count in contexts.items() if count == 1]
    assert not [point for point in QUICK.candidates(profiler.measured) if point.batch in alone]


def test_too_few_batches_are_an_error() -> None:
    """With nothing that could be left out there is no uncertainty."""
    points = [SoloPoint(132, batch, batch * context, 5.0 + batch) for batch in (1, 8, 32) for context in (256, 512)]
    with pytest.raises(SampleError, match="need at least 5"):
        next_point(points, [OperatingPoint(16, 256)], least_squares())
    assert next_point(points, [], least_squares()) is None


@pytest.mark.parametrize("model", ["llama3-8b", "qwen2.5-7b"])
def test_chosen_points_predict_the_measured_gpu_better_than_random_ones(model: str) -> None:
    """On the H200 samples: ten points chosen one by one, against the mean of ten drawn at random (beside the corners)."""
    everything = solo_points(shipped_samples("h200", model))
    solve = least_squares()
    by_point: dict[OperatingPoint, list[SoloPoint]] = {}
    for point in everything:
        by_point.setdefault(OperatingPoint(point.batch, point.kv_tokens // point.batch), []).append(point)
    known = sorted(by_point)
    batches = sorted({point.batch for point in known})
    corners = [next(p for p in known if p.batch == batch) for batch in (batches[0], *batches[2:-1:2], batches[-1])]
    corners.append([point for point in known if point.batch == batches[2]][-1])

    def error(points: Sequence[OperatingPoint]) -> float:
        chosen = [sample for point in points for sample in by_point[point]]
        return solo_errors(fit_solo(chosen, "stepped", solve), everything).mean

    chosen = list(dict.fromkeys(corners))
    budget = len(chosen) + 6
    rng = np.random.default_rng(0)
    rest = [point for point in known if point not in chosen]
    random = [error([*chosen, *(rest[i] for i in rng.permutation(len(rest))[:6])]) for _ in range(20)]
    while len(chosen) < budget:
        measured = [sample for point in chosen for sample in by_point[point]]
        choice = next_point(measured, [point for point in known if point not in chosen], solve)
        assert choice is not None
        chosen.append(choice.point)
    assert error(chosen) < mean(random)
