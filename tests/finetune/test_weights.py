"""Where frozen weights are: windows of slots, memory that is given back, and the served model's own tensors."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from backends.cuda.finetune.assembly import SharedWeights
from backends.cuda.finetune.frozen_layer import FrozenLayout, host_master
from backends.cuda.finetune.fused_weights import unfused
from backends.cuda.finetune.layer_copies import LayerCopies
from backends.cuda.finetune.layer_weights import WindowedWeights
from backends.cuda.finetune.submodel import CutModel
from harli_core.errors import ConfigError, JobError, OutOfMemoryError
from tests.finetune.copy_link import Link, Mark
from tests.finetune.tiny import (
    LAYERS,
    gradients,
    plain_gradients,
    recipe,
    run_all,
    run_step,
    tiny_base,
    tiny_engine,
    tiny_feed,
    tiny_peft,
    worst_difference,
)

CPU = torch.device("cpu")


class Ledger:
    """A place that slots come from, with room for ``layers``; counts what is out."""

    def __init__(self, layers: int) -> None:
        """Nothing is out."""
        self.layers = layers
        self.out = 0

    def allocate(self, size_bytes: int, stream: Any) -> Any:
        """See `SlotMemory`."""
        if self.out >= self.layers:
            raise OutOfMemoryError("the ledger is empty")
        self.out += 1
        made = torch.empty(size_bytes, dtype=torch.uint8)
        weakref.finalize(made.untyped_storage(), self._back)
        return made

    def _back(self) -> None:
        self.out -= 1


class WindowedMachine(RuleBasedStateMachine):
    """Random walks and sizes: the layer in use always has its own weights, and memory comes and goes with the window."""

    @initialize(capacity=st.integers(2, LAYERS), room=st.integers(2, LAYERS))
    def start(self, capacity: int, room: int) -> None:
        """A window over a tiny model, with memory for ``room`` layers."""
        model = CutModel(tiny_peft())
        self.expected = [[part.detach().clone() for _, part in layer.frozen] for layer in model.layers]
        layout = FrozenLayout.of(model.layers[0])
        masters = [host_master(layer, layout, pinned=False) for layer in model.layers]
        self.ledger = Ledger(room)
        self.layers = model.layers
        self.weights = WindowedWeights(model.layers, layout, masters, capacity, CPU, self.ledger.allocate)
        self.walk = 0
        assert self.weights.capacity == min(capacity, room)

    @rule(steps=st.integers(0, 2 * LAYERS))
    def go_on(self, steps: int) -> None:
        """Use every layer on the way."""
        for _ in range(steps):
            self.walk = (self.walk + 1) % (2 * LAYERS)
            assert self.weights.ready(self.walk)
            self.use(None)

    def use(self, stream: Any) -> None:
        """A unit on ``stream`` finds the layer's own weights."""
        layer = self.weights.window.layer_at(self.walk)
        self.weights.use(self.walk, stream)
        found = [part for _, part in self.layers[layer].frozen]
        assert all(torch.equal(a, b) for a, b in zip(found, self.expected[layer], strict=True))
        self.weights.used(self.walk, None)

    @rule(layers=st.integers(0, LAYERS + 1))
    def resize(self, layers: int) -> None:
        """Shrink or grow; no more than there is memory for, no less than the minimum."""
        wanted = max(2, min(layers, LAYERS))
        assert self.weights.resize(layers, self.walk) == min(wanted, self.ledger.layers)

    @invariant()
    def books_agree(self) -> None:
        """Slots are what is out of the ledger: nobody else keeps their memory."""
        self.weights.check_integrity()
        assert self.ledger.out == self.weights.capacity


class CopiedMachine(WindowedMachine):
    """The same where layers arrive piece by piece over a slow link, and the link may be anywhere when a unit needs one."""

    @initialize(capacity=st.integers(2, LAYERS), room=st.integers(2, LAYERS), most=st.sampled_from((None, 1, 3)))
    def start(self, capacity: int, room: int, most: int | None) -> None:
        """As above, with a link."""
        super().start(capacity, room)
        self.link = Link()
        self.weights._copies = LayerCopies(self.link, most, 64)

    @rule(pieces=st.integers(0, 20))
    def link_goes_on(self, pieces: int) -> None:
        """As many pieces as it has time for."""
        self.link.go(pieces)
        self.weights.feed()

    @rule(steps=st.integers(0, 2 * LAYERS), wait=st.booleans())
    def go_on(self, steps: int, wait: bool) -> None:
        """Use every layer on the way: as soon as it is there, or at once."""
        for _ in range(steps):
            self.walk = (self.walk + 1) % (2 * LAYERS)
            ready = self.weights.ready(self.walk)
            while wait and not ready:
                self.link.go(1)
                ready = self.weights.ready(self.walk)
            self.use(self)

    @rule(layers=st.integers(0, LAYERS + 1))
    def resize(self, layers: int) -> None:
        """What is enqueued refers to its slots here, which it does not on a GPU: it is over first."""
        self.link.go()
        super().resize(layers)

    @invariant()
    def books_agree(self) -> None:
        """As above, once nothing is enqueued."""
        if self.link.queue:
            self.weights.check_integrity()
        else:
            super().books_agree()

    def wait_event(self, mark: Mark) -> None:
        """What a unit's stream does: the link goes on until the layer is there."""
        while not mark.query():
            self.link.go(1)


TestWindowedMachine = WindowedMachine.TestCase
TestWindowedMachine.settings = settings(max_examples=20, stateful_step_count=12, deadline=None)
TestCopiedMachine = CopiedMachine.TestCase
TestCopiedMachine.settings = TestWindowedMachine.settings


def test_a_window_needs_room_for_two_layers() -> None:
    """Too small a setting and too little memory are refused with figures."""
    with pytest.raises(ConfigError, match="window_layers = 1: must be 2 to 4"):
        tiny_engine(tiny_peft(), tiny_feed(), recipe(), window_layers=1)
    with pytest.raises(OutOfMemoryError, match="no room for 2 frozen layers of 0 MiB"):
        tiny_engine(tiny_peft(), tiny_feed(), recipe(), window_layers=3, slot_memory=Ledger(1).allocate)


def test_each_pass_swaps_as_little_as_possible() -> None:
    """With two of four layers resident a step loads four: each absent layer once on the way there, once back."""
    engine = tiny_engine(tiny_peft(), tiny_feed(), recipe(), window_layers=2)
    weights = engine.weights
    assert isinstance(weights, WindowedWeights)
    run_step(engine)
    before = weights.swapped_bytes
    run_step(engine)
    assert weights.swapped_bytes - before == 2 * (LAYERS - 2) * weights.layer_bytes


def test_frozen_weights_exist_once() -> None:
    """The model that was loaded is gone: host masters and slots are all there is of the layers."""
    model = tiny_peft()
    watched = [weakref.ref(part) for layer in CutModel(model).layers for _, part in layer.frozen]
    engine = tiny_engine(model, tiny_feed(), recipe(), window_layers=2)
    run_step(engine)
    assert [part for part in watched if part() is not None] == []


def fused(base: Any) -> list[dict[str, Any]]:
    """The layers' weights as a serving engine holds them: q, k, v in one tensor, gate and up in another."""
    made = []
    for layer in base.model.layers:
        own = dict(layer.named_parameters())
        tensors = {}
        for name, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            owner = name.rpartition(".")[0]
            for leaf in ("weight", "bias"):
                names = [f"{owner}.{part}_proj.{leaf}" for part in parts]
                if names[0] in own:
                    tensors[f"{name}.{leaf}"] = torch.cat([own.pop(part).detach() for part in names])
        made.append({**tensors, **{name: part.detach() for name, part in own.items()}})
    return made


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_shared_weights_are_the_servers_tensors(kind: str) -> None:
    """Gradients are those of ordinary PEFT; every frozen parameter lies in a tensor of the server, none is a copy."""
    base = tiny_base(kind)
    served = fused(base)
    outer = {name: part.detach().clone() for name, part in base.named_parameters() if ".layers." not in name}
    embedding = outer["model.embed_tokens.weight"]
    shared = SharedWeights(
        [unfused(base.config, tensors) for tensors in served],
        embedding,
        outer["model.norm.weight"],
        outer.get("lm_head.weight", embedding),
    )
    _, expected = plain_gradients(tiny_peft(kind), tiny_feed().batch(0))
    engine = tiny_engine(tiny_peft(kind), tiny_feed(), recipe(), shared=shared)
    owners = {part.untyped_storage().data_ptr() for tensors in served for part in tensors.values()}
    owners |= {part.untyped_storage().data_ptr() for part in outer.values()}
    frozen = [part for piece in engine.model.submodels for _, part in piece.frozen]
    assert {part.untyped_storage().data_ptr() for part in frozen} <= owners
    assert worst_difference(gradients(engine), expected) < 1e-9
    assert engine.shrink_window(2) == engine.grow_window(3) == LAYERS
    run_all(engine)
    assert engine.state.status == "finished"


def test_shared_weights_that_do_not_fit() -> None:
    """A missing tensor, one of another shape, a part of a tensor-parallel model, a window: refused by name."""
    base = tiny_base()
    layers = [unfused(base.config, tensors) for tensors in fused(base)]
    around = (base.model.embed_tokens.weight, base.model.norm.weight, base.lm_head.weight)
    with pytest.raises(JobError, match="a job on shared weights has no window"):
        tiny_engine(tiny_peft(), tiny_feed(), recipe(), shared=SharedWeights(layers, *around), window_layers=2)
    lacking = [{**layer} for layer in layers]
    del lacking[1]["self_attn.q_proj.weight"]
    with pytest.raises(JobError, match=r"layers\.1\.self_attn\.q_proj\.weight is missing"):
        tiny_engine(tiny_peft(), tiny_feed(), recipe(), shared=SharedWeights(lacking, *around))
    cut = [{**layer, "mlp.down_proj.weight": layer["mlp.down_proj.weight"][:16]} for layer in layers]
    with pytest.raises(JobError, match=r"layers\.0\.mlp\.down_proj\.weight has shape \(16, 48\), expected \(32, 48\)"):
        tiny_engine(tiny_peft(), tiny_feed(), recipe(), shared=SharedWeights(cut, *around))
    half = {"self_attn.qkv_proj.weight": torch.zeros(32, 32)}
    with pytest.raises(JobError, match="has 32 rows, expected 64: is it one rank of several"):
        unfused(base.config, half)
