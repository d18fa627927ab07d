"""The layer window keeps the layers that are used next."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from harli_core.errors import ConfigError, MemoryAccountingError
from harli_core.memory.window import LayerWindow, Swap


def window(layers: int, capacity: int, *resident: int) -> LayerWindow:
    """Return a window with ``resident`` layers."""
    made = LayerWindow(layers)
    for layer in resident:
        made.insert(layer)
    made.capacity = capacity
    return made


def test_walk_is_forward_then_backward() -> None:
    """Eight positions of four layers, and the distances from the last forward position."""
    four = LayerWindow(4)
    assert [four.layer_at(position) for position in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [four.distance(layer, 3) for layer in range(4)] == [4, 3, 2, 0]
    assert [four.distance(layer, 7) for layer in range(4)] == [0, 2, 3, 4]


def test_furthest_is_the_layer_used_last() -> None:
    """Walking forward it is the layer left behind longest; walking backward the one nearest the end."""
    assert window(8, 4, 0, 1, 2, 3).furthest(3) == 0
    assert window(8, 4, 4, 5, 6, 7).furthest(11) == 7


def test_layer_in_use_is_never_dropped() -> None:
    """With a minimum of one, the layer in use is kept whatever its next use, and also where it is the only one."""
    small = LayerWindow(2, minimum=1)
    small.insert(0)
    small.insert(1)
    for position in range(4):
        assert small.furthest(position) == 1 - small.layer_at(position)
    small.drop(0)
    assert small.furthest(1) is None


def test_two_places_suffice_but_not_one() -> None:
    """Of two layers the one not in use may be swapped; then nothing more goes."""
    two = window(8, 2, 0, 1)
    assert two.furthest(1) == 0
    two.drop(0)
    assert two.furthest(1) is None
    with pytest.raises(MemoryAccountingError, match="1 or more must stay"):
        two.drop(1)


def test_next_missing_is_the_nearest_absent_layer() -> None:
    """Ahead in the walk, and after the turn back those of the other side."""
    assert window(8, 4, 2, 3).next_missing(2) == 4
    assert window(8, 4, 6, 7).next_missing(6) == 5
    assert window(8, 8).next_missing(5) == 5


def test_no_prefetch_that_pushes_out_a_sooner_layer() -> None:
    """A full window that holds the next layers wants no other; one step on, it does."""
    full = window(8, 4, 2, 3, 4, 5)
    assert full.next_missing(2) is None
    assert full.next_missing(3) == 6
    assert full.furthest(3) == 2


def test_shrunk_capacity_leaves_an_excess_to_drop() -> None:
    """Dropping the furthest until nothing is in excess leaves the layers used next."""
    shrunk = window(8, 2, 0, 1, 2, 3, 4, 5)
    assert shrunk.excess == 4
    while shrunk.excess:
        layer = shrunk.furthest(1)
        assert layer is not None
        shrunk.drop(layer)
    assert shrunk.resident == (1, 2)
    assert shrunk.next_missing(1) is None


@pytest.mark.parametrize(("layers", "capacity"), [(8, 2), (8, 5), (8, 8), (32, 12)])
def test_a_pass_loads_as_few_layers_as_possible(layers: int, capacity: int) -> None:
    """A pass there and back loads ``2 * (layers - capacity)`` layers, Belady's number, and none of them late."""
    walked = window(layers, capacity, *range(capacity))
    loads = 0
    for step in range(6 * layers):
        position = step % (2 * layers)
        assert walked.layer_at(position) in walked.resident
        while (layer := walked.next_missing(position)) is not None:
            if len(walked.resident) == capacity:
                dropped = walked.furthest(position)
                assert dropped is not None
                assert walked.distance(dropped, position) > walked.distance(layer, position)
                walked.drop(dropped)
            walked.insert(layer)
            loads += 1
    assert loads == 3 * 2 * (layers - capacity)


def test_swaps_load_the_layer_in_use_first_and_drop_only_where_full() -> None:
    """A swap names what leaves only when all places are taken, and there is none once the next layers are resident."""
    walked = window(8, 3, 6, 7)
    first = walked.next_swap(0)
    assert first == Swap(None, 0)
    walked.insert(0)
    second = walked.next_swap(0)
    assert second == Swap(7, 1)
    walked.drop(7)
    walked.insert(1)
    assert walked.next_swap(0) == Swap(6, 2)
    walked.drop(6)
    walked.insert(2)
    assert walked.next_swap(0) is None


def test_bad_requests_are_refused() -> None:
    """Unknown, doubled and absent layers, a full window, and capacities out of bounds."""
    full = window(4, 2, 0, 1)
    for call, layer, message in (
        (full.insert, 0, "cannot insert layer 0 of 4"),
        (full.insert, 4, "cannot insert layer 4 of 4"),
        (full.insert, 2, "all 2 places are taken"),
        (full.drop, 3, "layer 3: it is not resident"),
    ):
        with pytest.raises(MemoryAccountingError, match=message):
            call(layer)
    for capacity in (1, 5):
        with pytest.raises(MemoryAccountingError, match=f"window capacity {capacity}: must be 2 to 4"):
            full.capacity = capacity
    for layers, minimum in ((1, 2), (4, 0)):
        with pytest.raises(ConfigError, match="minimum <= layers"):
            LayerWindow(layers, minimum)


class WindowMachine(RuleBasedStateMachine):
    """Random residents, capacities and positions against a brute-force look at the walk."""

    @initialize(layers=st.integers(2, 9))
    def start(self, layers: int) -> None:
        """Begin empty."""
        self.layers = layers
        self.window = LayerWindow(layers)
        self.capacity = layers
        self.resident: set[int] = set()

    def next_use(self, layer: int, position: int) -> int:
        """Distance by walking."""
        walk = [*range(self.layers), *reversed(range(self.layers))] * 2
        return walk.index(layer, position) - position

    @rule(layer=st.integers(0, 8))
    def insert(self, layer: int) -> None:
        """An absent layer goes in while there is room."""
        if layer >= self.layers or layer in self.resident or len(self.resident) >= self.capacity:
            with pytest.raises(MemoryAccountingError):
                self.window.insert(layer)
        else:
            self.window.insert(layer)
            self.resident.add(layer)

    @rule(layer=st.integers(0, 8))
    def drop(self, layer: int) -> None:
        """A resident layer goes out while one stays."""
        if layer not in self.resident or len(self.resident) < 2:
            with pytest.raises(MemoryAccountingError):
                self.window.drop(layer)
        else:
            self.window.drop(layer)
            self.resident.remove(layer)

    @rule(capacity=st.integers(2, 9))
    def resize(self, capacity: int) -> None:
        """The capacity changes at any time."""
        if capacity <= self.layers:
            self.window.capacity = self.capacity = capacity

    @precondition(lambda self: self.resident)
    @rule(position=st.integers(0, 17))
    def ask(self, position: int) -> None:
        """What to drop and what to load is what the walk says."""
        position %= 2 * self.layers
        use = {layer: self.next_use(layer, position) for layer in range(self.layers)}
        assert use == {layer: self.window.distance(layer, position) for layer in range(self.layers)}
        candidates = [layer for layer in self.resident if use[layer] > 0]
        expected = max(candidates, key=use.__getitem__) if len(self.resident) >= 2 else None
        assert self.window.furthest(position) == expected
        wanted = sorted(use, key=use.__getitem__)[: self.capacity]
        missing = [layer for layer in wanted if layer not in self.resident]
        assert self.window.next_missing(position) == (missing[0] if missing else None)

    @invariant()
    def agrees_with_the_model(self) -> None:
        """Residents and excess are those of the model."""
        self.window.check_integrity()
        assert self.window.resident == tuple(sorted(self.resident))
        assert self.window.excess == max(0, len(self.resident) - self.capacity)


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(max_examples=50, stateful_step_count=25, deadline=None, database=None)
