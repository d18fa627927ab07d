"""Captured units, on the CPU: the cache, the stages and the slots, with work that is replayed at fixed addresses.

A CUDA graph reads and writes the addresses that it saw when it was captured. `FixedAddresses` keeps to that: a replay
does the work again with the very tensors that the module had then, whatever it has now.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backends.cuda.finetune.engine import FinetuneEngine
from backends.cuda.finetune.layer_graphs import GraphRunner
from backends.cuda.finetune.optimizer_step import UnitSettings
from tests.finetune.tiny import (
    LAYERS,
    Collected,
    recipe,
    run_all,
    run_step,
    tiny_engine,
    tiny_feed,
    tiny_peft,
    tiny_samples,
)


class Replayed:
    """Work, and the parameters that it saw."""

    def __init__(self, module: Any, work: Callable[[], None], sms: int | None) -> None:
        """Do nothing yet, as a capture does."""
        self.module, self.work, self.sms = module, work, sms
        self.parameters = {name: dict(part._parameters) for name, part in module.named_modules()}

    def replay(self) -> None:
        """Do the work with them, then put the present ones back."""
        now = {name: dict(part._parameters) for name, part in self.module.named_modules()}
        for parameters in (self.parameters, now):
            for name, part in self.module.named_modules():
                part._parameters.update(parameters[name])
            if parameters is self.parameters:
                self.work()


class FixedAddresses:
    """A `Capture` on the CPU; ``stream_sms`` plays a partition on which ``fast`` work is the faster one."""

    def __init__(self, stream_sms: int | None = None, fast: int | None = None) -> None:
        """All SMs unless told."""
        self.stream_sms, self.fast = stream_sms, fast
        self.planned: list[int | None] = []
        self.streams = 1
        self.replayed_for: list[int | None] = []
        self.unit_memory = Overwritten()

    def key(self, stream: Any) -> int | None:
        """Streams are not looked at; the number of the present one."""
        return self.streams

    def sms(self, stream: Any) -> int | None:
        """As told."""
        return self.stream_sms

    @contextmanager
    def planned_for(self, sms: int | None) -> Iterator[None]:
        """Remember what eager work was planned for."""
        self.planned.append(sms)
        yield

    def capture(self, module: Any, work: Callable[[], None], stream: Any, sms: int | None) -> Replayed:
        """Work for later."""
        self.unit_memory.overwrite()
        return Replayed(module, work, sms)

    def ms(self, graph: Replayed) -> float:
        """Replays, as timing does; what they leave behind must not matter."""
        graph.replay()
        return 1.0 if graph.sms == self.fast else 2.0

    def memory(self, stream: Any) -> AbstractContextManager[Any]:
        """Memory that the next unit takes over: what the last one allocated in it holds no number from here on."""
        self.unit_memory.overwrite()
        return self.unit_memory

    def forget(self, key: int) -> None:
        """Nothing is kept here."""


class Overwritten(TorchDispatchMode):  # type: ignore[misc]
    """Notes every floating tensor that is made inside, for `overwrite`."""

    def __init__(self) -> None:
        """Nothing was made."""
        super().__init__()
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note results that are in no argument's memory."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        given = {part.untyped_storage().data_ptr() for part in tree_leaves((args, kwargs)) if torch.is_tensor(part)}
        self.made += [
            part
            for part in tree_leaves(found)
            if torch.is_tensor(part) and part.is_floating_point() and part.untyped_storage().data_ptr() not in given
        ]
        return found

    def overwrite(self) -> None:
        """Another unit has the memory: none of it is a number now."""
        with torch.no_grad():
            for part in self.made:
                part.detach().fill_(math.nan)
        self.made.clear()


def graphs_of(engine: FinetuneEngine) -> GraphRunner:
    """The cache of an engine that has one."""
    assert isinstance(engine.runner, GraphRunner)
    return engine.runner


def equal_lengths() -> Any:
    """A feed whose micro-batches all have one shape, so that every unit comes again."""
    return tiny_feed(4, 24, samples=[sample for sample in tiny_samples(300) if len(sample) == 12][:12])


def trained(capture: FixedAddresses | None, **options: Any) -> tuple[list[float], dict[str, Any], FinetuneEngine]:
    """Losses, final state and the engine of a short run with dropout."""
    seen = Collected()
    engine = tiny_engine(
        tiny_peft(lora_dropout=0.1), equal_lengths(), recipe(), on_step=seen, capture=capture, **options
    )
    run_all(engine)
    return seen.losses, engine.states.tensors(), engine


@pytest.mark.parametrize("window", [2, 3, LAYERS])
def test_graphs_on_slots_train_the_same_to_the_bit(window: int) -> None:
    """Layers that take turns in the slots of captured graphs, LoRA parameters staged: losses and state are unchanged."""
    losses, state, _ = trained(None)
    replayed_losses, replayed_state, engine = trained(FixedAddresses(), window_layers=window)
    assert replayed_losses == losses
    assert all(torch.equal(tensor, state[name]) for name, tensor in replayed_state.items())
    counters = graphs_of(engine).counters
    assert counters.replayed > counters.eager
    # Forward and backward on each slot; the lowest layer's backward, without a gradient for its input, where that was.
    assert 2 * window <= counters.captured <= 3 * window
    assert counters.eager == 3


def test_layers_that_differ_do_not_share_graphs() -> None:
    """Another rank or scaling in one layer has graphs of its own: what differs is baked into a graph."""
    lora: dict[str, Any] = {"rank_pattern": {"1.self_attn.q_proj": 2}, "alpha_pattern": {"2.self_attn.q_proj": 5}}
    eager, graphs = (
        tiny_engine(tiny_peft(**lora), equal_lengths(), recipe(), window_layers=2, capture=capture)
        for capture in (None, FixedAddresses())
    )
    run_all(eager)
    run_all(graphs)
    state = eager.states.tensors()
    assert all(torch.equal(tensor, state[name]) for name, tensor in graphs.states.tensors().items())
    assert graphs_of(graphs).counters.replayed > 0


@pytest.mark.parametrize(("fast", "kept"), [(56, 56), (None, None)])
def test_the_faster_way_to_plan_for_a_partition_is_kept(fast: int | None, kept: int | None) -> None:
    """On part of the chip the first capture is timed both ways, all graphs of that shape go the faster way."""
    losses, _, _ = trained(None)
    capture = FixedAddresses(stream_sms=56, fast=fast)
    timed_losses, _, engine = trained(capture, window_layers=2)
    assert timed_losses == losses
    runner = graphs_of(engine)
    assert {graph.sms for graph in runner._graphs.values()} == {kept}
    assert set(runner.counters.targeted.values()) == {kept == 56}
    assert capture.planned == [56, 56, 56]


def test_another_stream_has_graphs_of_its_own() -> None:
    """A graph keeps the SMs of its stream: on another stream the units are captured anew, and forgotten with it."""
    capture = FixedAddresses()
    engine = tiny_engine(tiny_peft(), equal_lengths(), recipe(6), window_layers=2, capture=capture)
    run_step(engine)
    run_step(engine)
    first = graphs_of(engine).counters.captured
    capture.streams = 2
    run_step(engine)
    run_step(engine)
    assert graphs_of(engine).counters.captured == 2 * first
    graphs_of(engine).forget(None)
    assert {key[0] for key in graphs_of(engine)._graphs} == {1}


def test_kept_activations_are_not_captured() -> None:
    """With nothing recomputed the forward units keep their own graphs of tensors, eagerly."""
    losses, _, _ = trained(None)
    kept_losses, _, engine = trained(FixedAddresses(), settings=UnitSettings(recompute="none"))
    assert kept_losses == losses
    assert graphs_of(engine).counters.replayed == 0


def test_a_graph_is_captured_only_where_the_host_has_time() -> None:
    """Without time every unit runs kernel by kernel, with time they are graphs; losses and state are the same to the bit."""
    captured: dict[float, int] = {}
    trained_with: dict[float, tuple[list[float], dict[str, Any]]] = {}
    for host_ms in (0.0, 1e6):
        seen = Collected()
        engine = tiny_engine(tiny_peft(), equal_lengths(), recipe(), on_step=seen, capture=FixedAddresses())
        while (unit := engine.next_unit()) is not None:
            engine.run(unit, None, host_ms)
        captured[host_ms] = graphs_of(engine).counters.captured
        trained_with[host_ms] = seen.losses, engine.states.tensors()
    assert captured[0.0] == 0 < captured[1e6]
    (losses, state), (graph_losses, graph_state) = trained_with.values()
    assert graph_losses == losses
    assert all(torch.equal(tensor, state[name]) for name, tensor in graph_state.items())


def test_a_capture_that_was_held_up_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one that took a second the host's time seems too short for others; not for good."""
    engine = tiny_engine(tiny_peft(), equal_lengths(), recipe(max_steps=400), capture=FixedAddresses())
    runner = graphs_of(engine)
    monkeypatch.setattr(runner, "_capture_ms", 1000.0)
    eager_steps = 0
    while runner.counters.captured == 0 and (unit := engine.next_unit()) is not None:
        engine.run(unit, None, 30.0)
        eager_steps = engine.state.step
    assert runner.counters.captured == 1
    assert eager_steps < 100


@pytest.mark.parametrize("host_ms", [None, 0.0])
def test_nothing_of_a_unit_s_own_memory_is_read_later(host_ms: float | None) -> None:
    """Eager units and head + loss leave copies of their results: losses and state are those of plain memory."""
    losses, state, _ = trained(None)
    seen, capture = Collected(), FixedAddresses()
    engine = tiny_engine(tiny_peft(lora_dropout=0.1), equal_lengths(), recipe(), on_step=seen, capture=capture)
    while (unit := engine.next_unit()) is not None:
        engine.run(unit, None, host_ms)
    assert seen.losses == losses
    assert all(torch.equal(tensor, state[name]) for name, tensor in engine.states.tensors().items())


def test_what_is_kept_from_a_unit_s_memory_is_no_number() -> None:
    """The test above would see it: a tensor made inside is NaN afterwards, one that was there before is not."""
    before, memory = torch.zeros(3), Overwritten()
    with memory:
        made = before + 1.0
        before += made
    assert made.tolist() == [1.0, 1.0, 1.0]
    memory.overwrite()
    assert made.isnan().all()
    assert before.tolist() == [1.0, 1.0, 1.0]


def test_outputs_are_used_again() -> None:
    """From the second step on the outputs of forward units lie where those of the first one lay."""
    engine = tiny_engine(tiny_peft(), equal_lengths(), recipe(), capture=FixedAddresses())
    places: list[set[int]] = []
    while engine.state.step < 4 and (unit := engine.next_unit()) is not None:
        step = engine.state.step
        engine.run(unit)
        places += [set() for _ in range(step + 1 - len(places))]
        if unit.kind == "forward" and unit.layer is not None and unit.micro_batch is not None:
            places[step].add(engine._step.activations.input(unit.layer + 1, unit.micro_batch).data_ptr())
    assert places[2] == places[3]
    assert len(places[3]) == LAYERS * len(engine._step.batch.micro_batches)


def test_eager_outputs_do_not_pile_up() -> None:
    """Units for whose graphs the host never has time leave no more outputs behind than are alive at once."""
    capture = FixedAddresses()
    engine = tiny_engine(tiny_peft(), equal_lengths(), recipe(12), window_layers=2, capture=capture)
    spare = []
    while (unit := engine.next_unit()) is not None:
        step = engine.state.step
        capture.streams = 2 if step >= 2 and unit.kind == "forward" and unit.micro_batch == 0 else 1
        engine.run(unit, None, None if step < 2 else 0.0)
        if engine.state.step > step:
            spare.append(len(graphs_of(engine)._spare))
    assert graphs_of(engine).counters.eager > 12
    assert spare[2:] == spare[2:3] * 10
    assert spare[-1] <= LAYERS * len(engine._step.batch.micro_batches)


class OnAClock(FixedAddresses):
    """A capture takes 1 ms of the host, timing a graph 50 ms."""

    def __init__(self) -> None:
        """On a part of the chip."""
        super().__init__(stream_sms=56)
        self.now_s = 0.0

    def capture(self, module: Any, work: Callable[[], None], stream: Any, sms: int | None) -> Replayed:
        """See `Capture`."""
        self.now_s += 1e-3
        return super().capture(module, work, stream, sms)

    def ms(self, graph: Replayed) -> float:
        """See `Capture`."""
        self.now_s += 50e-3
        return super().ms(graph)


def test_the_first_graph_of_a_shape_is_timed_only_where_the_host_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture would fit, but the first of a shape on a part of the chip is timed too; once it was, others are captured."""
    capture = OnAClock()
    monkeypatch.setattr("backends.cuda.finetune.layer_graphs.perf_counter", lambda: capture.now_s)
    engine = tiny_engine(tiny_peft(), equal_lengths(), recipe(12), window_layers=2, capture=capture)
    captured = []
    for stream, host_ms in ((1, None), (2, 30.0), (2, None), (2, 30.0)):
        capture.streams = stream
        step, longest_ms = engine.state.step, 0.0
        while engine.state.step < step + 2 and (unit := engine.next_unit()) is not None:
            before_s = capture.now_s
            engine.run(unit, None, host_ms)
            longest_ms = max(longest_ms, 1e3 * (capture.now_s - before_s))
        assert host_ms is None or longest_ms <= host_ms
        captured.append(graphs_of(engine).counters.captured)
    assert captured[0] == captured[1] < captured[2]
