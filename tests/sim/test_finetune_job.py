"""A job walks its units arithmetically: time in, progress out; a small window makes it wait for layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.sim.finetune_job import FinetuneJob
from backends.sim.layer_swaps import LayerSwaps
from backends.sim.pcie_link import PcieLink
from harli_core.memory.window import LayerWindow
from harli_core.model import ModelShape
from harli_core.types import UnitKind
from harli_core.units import UnitOrder
from harli_core.working_set import JobShape

LAYERS, MICRO_BATCHES = 5, 2
MODEL = ModelShape("tiny", LAYERS, hidden=64, heads=4, kv_heads=4, head_dim=16, intermediate=128, vocab=256)
SHAPE = JobShape("job", MODEL, unit_tokens=1000, micro_batches=MICRO_BATCHES)
MS_ON_132: dict[UnitKind, float] = {"forward": 1.1, "head_loss": 3.7, "backward": 2.3, "optimizer": 0.4}
SMS = st.sampled_from([48, 96, 132])
WINDOWS = st.sampled_from([None, (2, 3.0), (2, 0.5), (3, 8.0), (5, 2.0), (4, 0.01)])
"""`None`: weights that are there anyway; else places in the window, and milliseconds to swap a layer in."""


def unit_ms(kind: UnitKind, sms: int) -> float:
    """Fewer SMs, longer units; not quite in proportion."""
    return MS_ON_132[kind] * (0.2 + 0.8 * 132 / sms)


def job_of(window: tuple[int, float] | None = None) -> FinetuneJob:
    """A fresh job; with a window nothing is resident at first."""
    capacity, swap_ms = window or (LAYERS, 0.0)
    places = LayerWindow(LAYERS, minimum=2)
    places.capacity = capacity
    swaps = LayerSwaps(places, PcieLink(1000.0), round(swap_ms * 1000))
    return FinetuneJob(SHAPE, unit_ms, swaps)


def step_ms(sms: int) -> float:
    """One optimizer step alone, unit by unit."""
    return math.fsum(unit_ms(unit.kind, sms) for unit in UnitOrder(LAYERS, MICRO_BATCHES).units)


@dataclass(frozen=True)
class Action:
    """One thing that an instance does with its job."""

    kind: str
    ms: float
    sms: int
    slowdown: float

    def on(self, job: FinetuneJob, now_ms: float) -> float:
        """Do it; returns when it is over."""
        if self.kind == "run":
            job.run(now_ms, self.ms, self.sms, self.slowdown)
            return now_ms + self.ms
        if self.kind == "turn":
            return now_ms + job.turn(now_ms, self.ms, self.sms)
        return now_ms + job.finish_unit()


ACTIONS = st.lists(
    st.builds(
        Action, st.sampled_from(["run", "turn", "finish"]), st.floats(0.0, 40.0), SMS, st.sampled_from([1.0, 1.25, 3.0])
    ),
    max_size=12,
)


def live(job: FinetuneJob, actions: list[Action], now_ms: float = 0.0) -> float:
    """Do all of them, one after another."""
    for action in actions:
        now_ms = action.on(job, now_ms)
    return now_ms


def state_of(job: FinetuneJob) -> tuple[object, ...]:
    """All that can be seen of a job."""
    swaps = job.swaps
    return (
        job.cursor.index, job.cursor.steps, job.fraction, job.sms, job.stall_ms,
        tuple(swaps.copies), swaps.swapped_bytes, tuple(swaps.window.resident),
    )  # fmt: skip


# -- full window ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sms", [48, 96, 132])
@pytest.mark.parametrize("slowdown", [1.0, 1.3])
def test_an_optimizer_step_takes_the_sum_of_its_units(sms: int, slowdown: float) -> None:
    """Just short of that time nothing is complete; just after it one step is, with all its tokens."""
    for factor, steps in ((1 - 1e-9, 0), (1 + 1e-9, 1), (3 - 1e-9, 2), (3 + 1e-9, 3)):
        job = job_of()
        job.run(0.0, step_ms(sms) * slowdown * factor, sms, slowdown)
        assert job.cursor.steps == steps
        assert job.tokens_done == steps * SHAPE.step_tokens
        assert job.stall_ms == 0.0


def test_progress_counts_units() -> None:
    """A step and a half of the first unit: tokens of the step, and half a unit's share of the next."""
    job = job_of()
    job.run(0.0, step_ms(132) + 0.5 * 1.1, 132)
    assert job.progress_tokens == pytest.approx(2000 * (1 + 0.5 / len(UnitOrder(LAYERS, MICRO_BATCHES))))
    assert (job.cursor.unit.kind, job.sms) == ("forward", 132)
    assert job.in_flight_ms() == pytest.approx(0.5 * 1.1)


def test_a_cut_unit_goes_on_at_the_new_speed() -> None:
    """Half of a unit on 132 SMs, the rest on 48: half of the time on each."""
    job = job_of()
    job.run(0.0, 0.5 * unit_ms("forward", 132), 132)
    job.run(10.0, 0.5 * unit_ms("forward", 48) * (1 + 1e-9), 48)
    assert job.cursor.index == 1
    assert job.fraction < 1e-6


def test_finishing_a_unit_takes_what_it_needs() -> None:
    """On its own partition; between units there is nothing to finish."""
    job = job_of()
    assert job.finish_unit() == 0.0
    job.run(0.0, 0.25 * unit_ms("forward", 48), 48)
    assert job.finish_unit() == pytest.approx(0.75 * unit_ms("forward", 48))
    assert (job.cursor.index, job.fraction, job.sms, job.in_flight_ms()) == (1, 0.0, 0, 0.0)


# -- pieces -----------------------------------------------------------------------------------------------------------


@given(
    window=WINDOWS,
    spans=st.lists(st.tuples(st.floats(0.1, 60.0), SMS, st.sampled_from([1.0, 1.4])), min_size=1, max_size=4),
    cuts=st.integers(2, 40),
)
def test_pieces_of_time_add_up(
    window: tuple[int, float] | None, spans: list[tuple[float, int, float]], cuts: int
) -> None:
    """However the time is cut, progress, stalls and swaps are those of whole pieces."""
    whole, pieces = job_of(window), job_of(window)
    now_ms = 0.0
    for duration_ms, sms, slowdown in spans:
        whole.run(now_ms, duration_ms, sms, slowdown)
        for cut in range(cuts):
            pieces.run(now_ms + duration_ms * cut / cuts, duration_ms / cuts, sms, slowdown)
        now_ms += duration_ms
        assert pieces.progress_tokens == pytest.approx(whole.progress_tokens, rel=1e-9, abs=1e-6)
        assert pieces.stall_ms == pytest.approx(whole.stall_ms, rel=1e-9, abs=1e-9)


# -- turns ------------------------------------------------------------------------------------------------------------


@given(window=WINDOWS, before=ACTIONS, budget_ms=st.floats(0.0, 150.0))
def test_a_turn_stays_within_its_budget_and_ends_between_units(
    window: tuple[int, float] | None, before: list[Action], budget_ms: float
) -> None:
    """Never longer than allowed; a turn that did anything leaves no unit cut, one that did nothing changed nothing."""
    job = job_of(window)
    now_ms = live(job, before)
    old = (job.cursor.index, job.cursor.steps, job.fraction, job.sms)
    used_ms = job.turn(now_ms, budget_ms, 132)
    assert 0.0 <= used_ms <= budget_ms + 1e-9
    if used_ms == 0.0:
        assert (job.cursor.index, job.cursor.steps, job.fraction, job.sms) == old
    else:
        assert (job.fraction, job.sms) == (0.0, 0)


@given(before=ACTIONS, budget_ms=st.floats(0.0, 150.0))
def test_a_turn_takes_every_unit_that_fits(before: list[Action], budget_ms: float) -> None:
    """With all weights at hand: the time is that of the units passed, and one more would be too much."""
    job = job_of()
    live(job, before)
    in_flight_ms, was = job.in_flight_ms(), (job.cursor.steps, job.cursor.index)
    units = job.order.units
    used_ms = job.turn(0.0, budget_ms, 132)
    passed = (job.cursor.steps - was[0]) * len(units) + job.cursor.index - was[1]
    durations_ms = [unit_ms(units[(was[1] + k) % len(units)].kind, 132) for k in range(passed + 2)]
    if in_flight_ms:
        durations_ms[0] = in_flight_ms
    assert used_ms == pytest.approx(math.fsum(durations_ms[:passed]), abs=1e-9)
    least = max(passed + 1, 2 if in_flight_ms else 1)
    assert math.fsum(durations_ms[:least]) > budget_ms - 1e-9


def test_a_turn_may_finish_the_step() -> None:
    """Turns go over the end of an optimizer step into the next one."""
    job = job_of()
    used_ms = job.turn(0.0, 2.5 * step_ms(132), 132)
    assert job.cursor.steps == 2
    assert used_ms <= 2.5 * step_ms(132)


@given(window=WINDOWS, before=ACTIONS, budget_ms=st.floats(1.0, 100.0), share=st.floats(0.01, 1.0))
def test_a_turn_called_off_ends_at_the_next_unit(
    window: tuple[int, float] | None, before: list[Action], budget_ms: float, share: float
) -> None:
    """Somewhere in a turn: it goes on to the end of the unit that runs, never past the turn that was planned."""
    planned, called_off = job_of(window), job_of(window)
    now_ms = live(planned, before)
    live(called_off, before)
    turn_ms = planned.turn(now_ms, budget_ms, 132)
    if not turn_ms:
        return
    least_ms = turn_ms * share * (1 - 1e-6)
    used_ms = called_off.turn_past(now_ms, least_ms, 132)
    assert used_ms <= turn_ms + 1e-9
    assert called_off.progress_tokens <= planned.progress_tokens + 1e-6
    assert (called_off.fraction, called_off.sms) == (0.0, 0)
    if window is None:
        assert used_ms >= least_ms - 1e-9
        longest_ms = max(unit_ms(kind, sms) for kind in MS_ON_132 for sms in (48, 132))
        assert used_ms <= least_ms + longest_ms + 1e-9


# -- looking ahead ----------------------------------------------------------------------------------------------------


@given(window=WINDOWS, before=ACTIONS, ahead=ACTIONS, after=ACTIONS)
def test_restore_undoes_everything(
    window: tuple[int, float] | None, before: list[Action], ahead: list[Action], after: list[Action]
) -> None:
    """A job that looked ahead and went back is, to the bit, one that never looked; also from then on."""
    looked, straight = job_of(window), job_of(window)
    now_ms = live(looked, before)
    assert live(straight, before) == now_ms
    state = looked.snapshot()
    live(looked, ahead, now_ms)
    looked.restore(state)
    looked.swaps.window.check_integrity()
    assert state_of(looked) == state_of(straight)
    assert live(looked, after, now_ms) == live(straight, after, now_ms)
    assert state_of(looked) == state_of(straight)


@given(window=WINDOWS, before=ACTIONS, ahead=st.lists(ACTIONS, min_size=2, max_size=3))
def test_a_snapshot_can_be_restored_more_than_once(
    window: tuple[int, float] | None, before: list[Action], ahead: list[list[Action]]
) -> None:
    """Going back twice to one snapshot gives the same state twice."""
    job = job_of(window)
    now_ms = live(job, before)
    state, expected = job.snapshot(), state_of(job)
    for actions in ahead:
        live(job, actions, now_ms)
        job.restore(state)
        assert state_of(job) == expected


# -- windows ----------------------------------------------------------------------------------------------------------


@given(window=WINDOWS, actions=st.lists(st.tuples(st.floats(0.1, 60.0), SMS), max_size=8))
def test_a_window_is_never_faster_than_all_weights(
    window: tuple[int, float] | None, actions: list[tuple[float, int]]
) -> None:
    """At every moment a job that has to swap has done no more than one that has not; what it lacks it waited for."""
    small, full = job_of(window), job_of()
    now_ms = 0.0
    for duration_ms, sms in actions:
        small.run(now_ms, duration_ms, sms)
        full.run(now_ms, duration_ms, sms)
        now_ms += duration_ms
        assert small.progress_tokens <= full.progress_tokens + 1e-6
        assert 0.0 <= small.stall_ms <= now_ms + 1e-9
        assert small.stall_ms > 0.0 or small.progress_tokens == pytest.approx(full.progress_tokens)


def test_a_slow_link_is_what_a_small_window_waits_for() -> None:
    """Swapping takes longer than computing: a step lasts at least as long as its 2 * (5 - 2) layers need on the link.

    The link can do nothing while the walk turns at either end, hence not just as long.
    """
    job = job_of((2, 50.0))
    first, last = 10, 40
    job.run(0.0, first * 300.0, 132)
    before = (job.progress_tokens, job.swaps.swaps_in)
    job.run(first * 300.0, (last - first) * 300.0, 132)
    steps = (job.progress_tokens - before[0]) / SHAPE.step_tokens
    assert 0.9 * (last - first) < steps < last - first
    assert job.swaps.swaps_in - before[1] == pytest.approx(6 * steps, abs=3)
    assert job.stall_ms > 0.5 * last * 300.0


def test_a_fast_link_hides_behind_the_work() -> None:
    """Layers that come faster than they are used cost a first wait and nothing later."""
    job, full = job_of((3, 0.5)), job_of()
    for each in (job, full):
        each.run(0.0, 50 * step_ms(132), 132)
    assert job.stall_ms == pytest.approx(0.5)
    assert job.swaps.swaps_in > 50 * 4 - 10
    assert full.progress_tokens - job.progress_tokens < 0.05 * SHAPE.step_tokens


def test_a_full_window_loads_each_layer_once() -> None:
    """Room for all layers: after the first pass nothing moves any more."""
    job = job_of((LAYERS, 2.0))
    job.run(0.0, 20 * step_ms(132), 132)
    assert job.swaps.swaps_in == LAYERS
    assert job.swaps.swapped_bytes == LAYERS * 2000
    assert job.swaps.settled


def test_a_window_that_shrinks_begins_to_swap() -> None:
    """Layers dropped by a shrinking window are fetched again when the walk comes to them."""
    job = job_of((LAYERS, 2.0))
    job.run(0.0, 5 * step_ms(132), 132)
    job.swaps.window.capacity = 2
    job.swaps.shrink(job.cursor.unit.walk)
    assert len(job.swaps.window.resident) == 2
    assert not job.swaps.settled
    job.run(5 * step_ms(132), 5 * step_ms(132), 132)
    assert job.swaps.swaps_in > LAYERS + 5


@given(window=WINDOWS, actions=ACTIONS)
def test_the_layer_in_use_is_resident(window: tuple[int, float] | None, actions: list[Action]) -> None:
    """Whenever a unit is under way its layer is in the window, and the window is within its capacity."""
    job = job_of(window)
    now_ms = 0.0
    for action in actions:
        now_ms = action.on(job, now_ms)
        places = job.swaps.window
        places.check_integrity()
        if window is not None and job.fraction:
            assert places.layer_at(job.cursor.unit.walk) in places.resident
            assert len(places.resident) <= window[0]
