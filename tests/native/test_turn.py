"""A turn keeps the GPU busy while the host works, and ends when it must; on streams of arithmetic."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.cuda.serving.interleaving import Interleaving
from backends.cuda.serving.scheduler_factory import graph_sizes
from backends.cuda.serving.turn import MOST_LEAD_MS, Lead, Turn, goes_first
from backends.cuda.serving.unit_pump import Behind, UnitPump
from harli_core.types import UnitKind
from tests.native.software_gpu import Mark, SoftwareGpu, Stream, Streams, UnitWork, unit_ms

LEAD_MS = 2.0


@pytest.fixture
def gpu() -> SoftwareGpu:
    """A clock at 0."""
    return SoftwareGpu()


@pytest.fixture
def work(gpu: SoftwareGpu) -> UnitWork:
    """Forward and backward units in turn."""
    return UnitWork(gpu, Streams(gpu), ("forward", "backward"))


@pytest.fixture
def pump(gpu: SoftwareGpu, work: UnitWork) -> UnitPump:
    """Launches them."""
    return UnitPump(work, work.streams, gpu, unit_ms)  # type: ignore[arg-type]


def decoding(gpu: SoftwareGpu, pump: UnitPump, decode_ms: float) -> tuple[Interleaving, Any]:
    """A decode graph of ``decode_ms`` under way; also the plans, which are told whether a turn has begun."""
    decode = Stream(gpu)
    begin_ms, _ = decode.run(decode_ms)
    end = gpu.mark(decode)
    decoder: Any = SimpleNamespace(stream=decode, launched_end=end, began_ms=begin_ms, done=lambda: gpu.passed(end))
    plans: Any = SimpleNamespace(boundary_ms=0.0, turn_begun=False)
    return Interleaving(decoder, pump._partitions, gpu, plans, SimpleNamespace(pump=pump)), plans  # type: ignore[arg-type]


def held_plan(decode_sms: int, finetune_sms: int, turn_ms: float) -> Any:
    """A plan in force for some steps more."""
    plan = SimpleNamespace(jobs=(1,), decode_sms=decode_sms, hold=SimpleNamespace(max_step_ms=None))
    return SimpleNamespace(plan=plan, turn_budget_ms=turn_ms, elapsed_ms=0.0, finetune_sms=finetune_sms, steps_left=9)


def take_turn(turn: Turn, gpu: SoftwareGpu, until_ms: float) -> None:
    """As the serving loop does."""
    while not turn.advance(until_ms, LEAD_MS):
        gpu.now += 0.01


def test_a_turn_ends_in_time_with_less_than_a_unit_to_spare(gpu: SoftwareGpu, work: UnitWork, pump: UnitPump) -> None:
    """Units that take as long as predicted end by the end of the turn, and the next one would not have."""
    turn = Turn(pump, gpu)
    take_turn(turn, gpu, 20.0)
    ended_ms = work.ran[-1][1]
    assert ended_ms <= 20.0 < ended_ms + 2.0 + LEAD_MS
    assert turn.marks is not None
    gpu.now = max(gpu.now, ended_ms)
    assert gpu.between_ms(*turn.marks) == pytest.approx(ended_ms - work.ran[0][0], abs=0.15)  # the first launch


@given(
    until_ms=st.floats(0.0, 45.0),
    lead_ms=st.floats(0.1, MOST_LEAD_MS),
    launch_ms=st.tuples(st.floats(0.01, 0.8), st.floats(0.01, 0.8)),
    look_ms=st.floats(0.001, 0.2),
    first=st.sampled_from(("forward", "backward")),
)
def test_a_turn_of_any_length_holds_what_fits_into_it(
    until_ms: float, lead_ms: float, launch_ms: tuple[float, float], look_ms: float, first: UnitKind
) -> None:
    """Units one after another, none beyond the end, no room left for another; a launch and a look are let pass."""
    gpu = SoftwareGpu()
    kinds: tuple[UnitKind, ...] = (first, "backward", "forward")
    work = UnitWork(gpu, Streams(gpu), kinds)
    work.launch_ms = {"forward": launch_ms[0], "backward": launch_ms[1]}
    pump = UnitPump(work, work.streams, gpu, unit_ms)  # type: ignore[arg-type]
    turn = Turn(pump, gpu)
    while not turn.advance(until_ms, lead_ms):
        gpu.now += look_ms
    assert all(begin >= end for (_, end), (begin, _) in pairwise(work.ran))
    ended_ms = work.ran[-1][1] if work.ran else 0.0
    assert ended_ms <= until_ms + max(launch_ms) + 0.01
    assert max(gpu.now, ended_ms) + unit_ms(work.next_unit().kind, 1024, 132) > until_ms - max(launch_ms) - look_ms


def test_a_turn_leaves_the_host_time_to_launch_what_follows(gpu: SoftwareGpu, work: UnitWork, pump: UnitPump) -> None:
    """When it is over, units run for as long as the lead."""
    take_turn(Turn(pump, gpu), gpu, 20.0)
    assert work.ran[-1][1] - gpu.now == pytest.approx(LEAD_MS, abs=0.05)


def test_units_begun_ahead_follow_the_decode_graph_at_once(gpu: SoftwareGpu, work: UnitWork, pump: UnitPump) -> None:
    """The first one begins when the graph ends, and the GPU stays busy while the host reads results for the lead's time."""
    decode = Stream(gpu)
    _, due_ms = decode.run(5.0)
    turn = Turn(pump, gpu)
    while gpu.now < due_ms:
        turn.advance(due_ms + 20.0, due_ms - gpu.now + LEAD_MS, Behind(gpu.mark(decode), due_ms), due_ms)
        gpu.now += 0.01
    gpu.now += LEAD_MS  # results, admission, a plan
    take_turn(turn, gpu, due_ms + 20.0)
    assert work.ran[0][0] == pytest.approx(due_ms)
    gaps = [later[0] - earlier[1] for earlier, later in zip(work.ran, work.ran[1:], strict=False)]
    assert gaps == pytest.approx([0.0] * len(gaps), abs=0.02)
    assert work.ran[-1][1] <= due_ms + 20.0


def test_what_is_in_flight_before_the_emission_is_bounded(gpu: SoftwareGpu, work: UnitWork, pump: UnitPump) -> None:
    """A graph that takes much longer than expected does not pile units up behind it."""
    decode = Stream(gpu)
    decode.run(50.0)
    turn = Turn(pump, gpu)
    while gpu.now < 50.0:
        late_ms = max(gpu.now, 5.0)
        turn.advance(late_ms + 20.0, late_ms - gpu.now + LEAD_MS, Behind(gpu.mark(decode), late_ms), 5.0)
        gpu.now += 0.01
    assert sum(end - begin for begin, end in work.ran) <= LEAD_MS + 2.0 + 2.0


def test_a_turn_does_not_wait_for_a_unit_that_outlasts_it(gpu: SoftwareGpu, pump: UnitPump) -> None:
    """A unit beside decode runs on for longer than the turn: the next step, for which it leaves room, begins at once."""
    assert pump.keep_busy(22)  # 6 ms
    began_ms = gpu.now
    take_turn(Turn(pump, gpu), gpu, began_ms + 4.0)
    assert gpu.now - began_ms < 0.1
    assert pump.launched == 1


@pytest.mark.parametrize("late_ms", [-3.0, 3.0])
def test_units_behind_a_graph_are_dated_from_its_real_end(gpu: SoftwareGpu, pump: UnitPump, late_ms: float) -> None:
    """A graph that ends sooner or later than expected moves what waits for it, before any unit has ended."""
    decode = Stream(gpu)
    decode.run(10.0 + late_ms)
    turn = Turn(pump, gpu)
    turn.advance(40.0, 10.0 + LEAD_MS, Behind(gpu.mark(decode), 10.0), 10.0)
    gpu.now = 10.0 + late_ms
    pump.unblock(gpu.now - 0.1, gpu.now)
    assert pump.in_flight_ms() == pytest.approx(3.0, abs=0.15)  # forward and backward


@pytest.mark.parametrize("sms", [22, 132])
def test_only_what_a_turn_launched_is_hidden_from_plans(
    gpu: SoftwareGpu, work: UnitWork, pump: UnitPump, sms: int
) -> None:
    """A unit beside decode that outlasts it is in flight when the next plan is made; the turn's own units are not."""
    inter, plans = decoding(gpu, pump, 4.0)
    inter._decode_ms[110] = 4.0
    inter.lead.add(1.0)
    held = held_plan(110, 22 if sms == 22 else 0, turn_ms=10.0)
    held.steps_left = 1 if sms == 22 else 9  # no turn is sure to come that the unit would be left to
    inter.beside(held, lambda _due_ms: True)
    assert pump.last is not None
    assert pump.last.sms == sms
    assert plans.turn_begun is (sms == 132)


@pytest.mark.parametrize(("left_ms", "first"), [(0.5, True), (3.0, False)])
def test_a_unit_waits_for_the_whole_chip_if_it_ends_sooner_there(
    gpu: SoftwareGpu, pump: UnitPump, left_ms: float, first: bool
) -> None:
    """A forward unit takes 1 ms alone and 2 ms beside decode on half of the chip."""
    decode = Stream(gpu)
    decode.run(left_ms)
    behind = Behind(gpu.mark(decode), left_ms)
    assert goes_first(pump, 66, behind) is first
    assert goes_first(pump, 0, behind)


@pytest.mark.parametrize(("steps_left", "begins_ms"), [(9, 9.5), (1, 8.0)])
def test_a_partition_is_left_idle_before_a_turn_that_ends_its_unit_sooner(
    gpu: SoftwareGpu, steps_left: int, begins_ms: float
) -> None:
    """Units of 2 ms take 4 beside decode: with 1.5 ms left the third would run to 12, and on the whole chip to 11.5. It
    waits for that long before the host may enqueue it there, unless the turn is not sure to come.
    """
    work = UnitWork(gpu, Streams(gpu), ("backward",))
    pump = UnitPump(work, work.streams, gpu, unit_ms)  # type: ignore[arg-type]
    inter, _ = decoding(gpu, pump, 9.5)
    inter._decode_ms[66] = 9.5
    held = held_plan(66, 66, turn_ms=20.0)
    held.steps_left = steps_left
    inter.beside(held, lambda _due_ms: True)
    assert [begin_ms for begin_ms, _ in work.ran[:3]] == pytest.approx([0.1, 4.1, begins_ms], abs=0.2)


def test_a_unit_that_is_slow_to_launch_waits_until_the_host_is_free(
    gpu: SoftwareGpu, work: UnitWork, pump: UnitPump
) -> None:
    """The host must see the emission in time, so such a unit is not launched just before it."""
    work.launch_ms["backward"] = 3.0
    take_turn(Turn(pump, gpu), gpu, 8.0)
    gpu.now += 10.0
    while pump.next_unit().kind != "backward":  # type: ignore[union-attr]
        assert pump.keep_busy(66)
        gpu.now += 10.0
    launched = pump.launched
    assert not pump.keep_busy(66, free_ms=gpu.now + 1.0)
    assert pump.launched == launched
    assert pump.keep_busy(66, free_ms=gpu.now + 4.0)


def test_units_are_told_until_when_the_host_is_free(gpu: SoftwareGpu, work: UnitWork, pump: UnitPump) -> None:
    """Until the decode step behind the turn is to be launched; until the emission for units begun ahead and beside decode;
    without end when nothing decodes.
    """
    take_turn(Turn(pump, gpu), gpu, 20.0)
    assert work.host_free_ms == pytest.approx([20.0 - LEAD_MS] * len(work.ran), abs=0.01)
    decode = Stream(gpu)
    _, due_ms = decode.run(30.0)
    gpu.now = due_ms - 3.0
    Turn(pump, gpu).advance(due_ms + 20.0, 4.0, Behind(gpu.mark(decode), due_ms), due_ms)
    assert work.host_free_ms[-1] == pytest.approx(due_ms, abs=0.01)
    gpu.now = due_ms + 30.0
    assert pump.keep_busy(66, free_ms=due_ms + 39.0)
    assert work.host_free_ms[-1] == pytest.approx(due_ms + 39.0, abs=0.01)
    gpu.now += 30.0
    assert pump.keep_busy(66)
    assert work.host_free_ms[-1] is None


@pytest.mark.parametrize("known", [True, False])
def test_nothing_is_captured_when_the_emission_is_due(
    gpu: SoftwareGpu, work: UnitWork, pump: UnitPump, known: bool
) -> None:
    """A step that takes longer than the one before it, or is the first of its kind, may be over any time: no host time."""
    inter, _ = decoding(gpu, pump, 9.0)
    if known:
        inter._decode_ms[66] = 3.0
    inter.beside(held_plan(66, 66, turn_ms=0.0), lambda _due_ms: True)
    told = [
        (begin_ms, free_ms)
        for (begin_ms, _), free_ms in zip(work.ran, work.host_free_ms, strict=True)
        if free_ms is not None
    ]
    assert len(told) == len(work.ran) >= 4
    assert all(free_ms <= begin_ms for begin_ms, free_ms in told[2 if known else 0 :])


def test_units_on_another_partition_are_timed_from_their_own_beginning(
    gpu: SoftwareGpu, work: UnitWork, pump: UnitPump
) -> None:
    """What a unit waits for the one before it on another stream does not count as its own time."""
    assert pump.keep_busy(22)  # 6 ms
    take_turn(Turn(pump, gpu), gpu, 20.0)
    gpu.now += 30.0
    pump.poll()
    unit = pump.next_unit()
    assert unit is not None
    assert pump.expected_ms(unit, 132) == pytest.approx(unit_ms(unit.kind, 1024, 132))


@pytest.mark.parametrize(("jobs", "finetune_sms", "turn_ms"), [((1,), 0, 20.0), ((1,), 64, 0.0), ((), 0, 0.0)])
def test_copies_of_layers_go_on_while_a_step_runs(
    gpu: SoftwareGpu, work: UnitWork, pump: UnitPump, jobs: tuple[int, ...], finetune_sms: int, turn_ms: float
) -> None:
    """Whatever the plan gives finetuning, and so too where it has no unit to launch until the step is over."""
    interleaving, _ = decoding(gpu, pump, 30.0)
    held = held_plan(132 - finetune_sms, finetune_sms, turn_ms)
    held.plan.jobs = jobs
    interleaving._decode_ms[held.plan.decode_sms] = 30.0
    looked: list[float] = []

    def meanwhile(_due_ms: float | None) -> bool:
        looked.append(gpu.now)
        gpu.now += 0.1
        return True

    interleaving.beside(held, meanwhile)
    waits = [later - before for before, later in pairwise([0.0, *work.copied_ms, gpu.now])]
    assert max(waits) < 1.0
    assert len(looked) > 100


def test_the_lead_is_what_launches_took_lately() -> None:
    """The longest of the last launches and a little more, and never more than the bound."""
    lead = Lead()
    assert lead.ms < 1.0
    lead.add(1.5)
    assert 1.5 < lead.ms < MOST_LEAD_MS
    lead.add(40.0)
    assert lead.ms == MOST_LEAD_MS
    for _ in range(100):
        lead.add(0.5)
    assert lead.ms < 1.0


def test_a_step_that_ran_without_a_graph_has_waited_for_nothing(
    gpu: SoftwareGpu, work: UnitWork, pump: UnitPump
) -> None:
    """It may be over before the unit that a graph would have waited for: nothing is read off that unit then."""
    decode = Stream(gpu)
    plans = SimpleNamespace(boundary_ms=0.0, turn_begun=False)
    decoder: Any = SimpleNamespace(stream=decode, began_ms=0.0)
    interleaving = Interleaving(decoder, work.streams, gpu, plans, SimpleNamespace(pump=pump))  # type: ignore[arg-type]
    unit = pump.ready_unit()
    assert unit is not None
    pump.launch(unit, pump.total_sms)
    assert interleaving.behind(132) is not None
    begin_ms, end_ms = decode.run(0.1)
    gpu.now = max(gpu.now, end_ms)
    held: Any = SimpleNamespace(plan=SimpleNamespace(decode_sms=132, jobs=(1,)), turn_budget_ms=0.0)
    step: Any = SimpleNamespace(begin=Mark(begin_ms), decode_ms=end_ms - begin_ms)
    assert interleaving.over(held, gpu.now, step) == 0.0
    assert interleaving.start_gap_ms == []


@pytest.mark.parametrize(("jobs", "gaps"), [((1,), 1), ((), 0)])
def test_pauses_are_no_gaps_before_a_step(
    gpu: SoftwareGpu, work: UnitWork, pump: UnitPump, jobs: tuple[int, ...], gaps: int
) -> None:
    """Where the plan has no finetuning the last unit ended before a pause, however long that was."""
    plans = SimpleNamespace(boundary_ms=0.0, turn_begun=False)
    decoder: Any = SimpleNamespace(stream=Stream(gpu), began_ms=0.0)
    interleaving = Interleaving(decoder, work.streams, gpu, plans, SimpleNamespace(pump=pump))  # type: ignore[arg-type]
    unit = pump.ready_unit()
    assert unit is not None
    pump.launch(unit, pump.total_sms)
    assert interleaving.behind(132) is not None
    gpu.now += 500.0
    held: Any = SimpleNamespace(plan=SimpleNamespace(decode_sms=132, jobs=jobs), turn_budget_ms=0.0)
    step: Any = SimpleNamespace(begin=Mark(gpu.now), decode_ms=1.0)
    interleaving.over(held, gpu.now, step)
    assert len(interleaving.start_gap_ms) == gaps


def test_a_unit_from_before_a_pause_is_no_gap_of_the_first_step_behind_it(
    gpu: SoftwareGpu, work: UnitWork, pump: UnitPump
) -> None:
    """The plan finetunes again, but the last unit is that of a step long over."""
    plans = SimpleNamespace(boundary_ms=0.0, turn_begun=False)
    decoder: Any = SimpleNamespace(stream=Stream(gpu), began_ms=0.0)
    interleaving = Interleaving(decoder, work.streams, gpu, plans, SimpleNamespace(pump=pump))  # type: ignore[arg-type]
    held: Any = SimpleNamespace(plan=SimpleNamespace(decode_sms=132, jobs=(1,)), turn_budget_ms=0.0)
    for launched in (True, False, True):
        unit = pump.ready_unit()
        assert unit is not None
        if launched:
            pump.launch(unit, pump.total_sms)
        assert interleaving.behind(132) is not None
        gpu.now += 500.0
        interleaving.over(held, gpu.now, SimpleNamespace(begin=Mark(gpu.now), decode_ms=1.0))  # type: ignore[arg-type]
    assert len(interleaving.start_gap_ms) == 2


def test_layers_are_copied_while_a_unit_runs(gpu: SoftwareGpu, work: UnitWork, pump: UnitPump) -> None:
    """Each look at what is in flight lets them go on, also where no unit is wanted; a fault there stops the job."""
    take_turn(Turn(pump, gpu), gpu, 20.0)
    before = len(work.copied_ms)
    assert before > 100
    assert not pump.wants_more(0.0)
    assert len(work.copied_ms) == before + 1
    work.copy_layers = lambda: 1 / 0  # type: ignore[assignment, method-assign]
    pump.poll()
    assert pump.over
    assert pump.failure is not None
    assert "ZeroDivisionError" in pump.failure


@pytest.mark.parametrize("max_batch", [1, 3, 8, 100, 256, 257, 300, 512, 1000])
def test_every_batch_has_a_graph(max_batch: int) -> None:
    """The largest graph is of the largest batch, and none is far from the next."""
    sizes = graph_sizes(max_batch)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_batch
    assert all(small >= large / 4 for small, large in pairwise(sizes))
    assert all(large - small <= 64 for small, large in pairwise(sizes))
