"""The order of one optimizer step's units, their place in the window's walk, and the cursor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harli_core.errors import ConfigError
from harli_core.memory.window import LayerWindow
from harli_core.units import UnitCursor, UnitOrder


def test_two_layers_two_micro_batches_in_full() -> None:
    """Layer-major forward, head and loss, layers back to front, then the optimizer layer by layer."""
    units = [(unit.kind, unit.layer, unit.micro_batch, unit.walk) for unit in UnitOrder(2, 2).units]
    assert units == [
        ("forward", 0, 0, 0),
        ("forward", 0, 1, 0),
        ("forward", 1, 0, 1),
        ("forward", 1, 1, 1),
        ("head_loss", None, 0, 1),
        ("head_loss", None, 1, 1),
        ("backward", 1, 0, 2),
        ("backward", 1, 1, 2),
        ("backward", 0, 0, 3),
        ("backward", 0, 1, 3),
        ("optimizer", 0, None, 3),
        ("optimizer", 1, None, 3),
    ]


def test_one_layer_one_micro_batch() -> None:
    """The smallest step there is: one unit of each kind."""
    assert [unit.kind for unit in UnitOrder(1, 1).units] == ["forward", "head_loss", "backward", "optimizer"]


@given(layers=st.integers(1, 6), micro_batches=st.integers(1, 4))
def test_each_piece_of_work_occurs_once(layers: int, micro_batches: int) -> None:
    """Every layer forward and backward for every micro-batch, one loss a micro-batch, one update a layer."""
    order = UnitOrder(layers, micro_batches)
    found = {(unit.kind, unit.layer, unit.micro_batch) for unit in order.units}
    everything: set[tuple[str, int | None, int | None]] = {
        (kind, layer, mb) for kind in ("forward", "backward") for layer in range(layers) for mb in range(micro_batches)
    }
    everything |= {("head_loss", None, mb) for mb in range(micro_batches)}
    everything |= {("optimizer", layer, None) for layer in range(layers)}
    assert found == everything
    assert len(order) == len(order.units) == len(everything)


@given(layers=st.integers(1, 6), micro_batches=st.integers(1, 4))
def test_walk_agrees_with_the_window(layers: int, micro_batches: int) -> None:
    """A unit's walk position is one at which the window holds its layer, and the walk never goes back."""
    units = UnitOrder(layers, micro_batches).units
    window = LayerWindow(layers, minimum=1)
    assert all(window.layer_at(unit.walk) == unit.layer for unit in units if unit.kind in ("forward", "backward"))
    walks = [unit.walk for unit in units]
    assert walks == sorted(walks)


@given(layers=st.integers(1, 6), micro_batches=st.integers(1, 4))
def test_a_layer_is_visited_twice_a_step(layers: int, micro_batches: int) -> None:
    """One swap-in serves all micro-batches: a layer's units are adjacent, once forward and once backward."""
    layer_of = [(unit.kind, unit.layer) for unit in UnitOrder(layers, micro_batches).units if unit.kind != "optimizer"]
    visits = [key for index, key in enumerate(layer_of) if index == 0 or layer_of[index - 1] != key]
    assert len(visits) == len(set(visits)) == 2 * layers + 1


def test_groups_in_full() -> None:
    """With room for one micro-batch's activations at a time, each goes forward and back before the next; one optimizer."""
    units = [(unit.kind, unit.layer, unit.micro_batch, unit.walk) for unit in UnitOrder(1, 2, group=1).units]
    assert units == [
        ("forward", 0, 0, 0),
        ("head_loss", None, 0, 0),
        ("backward", 0, 0, 1),
        ("forward", 0, 1, 0),
        ("head_loss", None, 1, 0),
        ("backward", 0, 1, 1),
        ("optimizer", 0, None, 1),
    ]


@given(layers=st.integers(1, 4), micro_batches=st.integers(1, 5), group=st.integers(1, 6), parts=st.integers(1, 3))
def test_groups_and_parts_change_only_the_order(layers: int, micro_batches: int, group: int, parts: int) -> None:
    """The same work whatever the grouping; each head + loss comes in its parts, in order."""
    cut = UnitOrder(layers, micro_batches, group=group, head_parts=parts).units
    whole = UnitOrder(layers, micro_batches).units
    heads = [(unit.micro_batch, unit.part) for unit in cut if unit.kind == "head_loss"]
    assert heads == [(mb, part) for mb in range(micro_batches) for part in range(parts)]
    assert {unit for unit in cut if unit.part == 0} == set(whole)
    assert len(cut) == len(set(cut)) == len(whole) + micro_batches * (parts - 1)


@pytest.mark.parametrize(("group", "parts", "together"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_no_group_or_part_is_refused(group: int, parts: int, together: int) -> None:
    """A group, a head + loss or an optimizer unit of nothing is a configuration error that says all three."""
    with pytest.raises(ConfigError, match=f"not {group} and {parts} and {together}"):
        UnitOrder(1, 1, group=group, head_parts=parts, optimizer_layers=together)


@given(layers=st.integers(1, 9), together=st.integers(1, 12))
def test_an_optimizer_unit_may_update_several_layers(layers: int, together: int) -> None:
    """Its layer is the first one; the units after each other cover every layer once."""
    units = [unit for unit in UnitOrder(layers, 1, optimizer_layers=together).units if unit.kind == "optimizer"]
    ends = [unit.layer for unit in units[1:]] + [layers]
    covered = [layer for unit, end in zip(units, ends, strict=True) for layer in range(unit.layer or 0, end or 0)]
    assert covered == list(range(layers))
    assert len(units) == -(-layers // together)


@pytest.mark.parametrize(("layers", "micro_batches"), [(0, 1), (1, 0), (-1, 2)])
def test_no_layers_or_micro_batches_are_refused(layers: int, micro_batches: int) -> None:
    """A step of nothing is a configuration error that says both counts."""
    with pytest.raises(ConfigError, match=f"not {layers} and {micro_batches}"):
        UnitOrder(layers, micro_batches)


def test_cursor_wraps_into_the_next_step() -> None:
    """After the last unit comes the first one of the next optimizer step."""
    cursor = UnitCursor(UnitOrder(2, 1))
    for index in range(1, len(cursor.order)):
        cursor.advance_to(index)
        assert (cursor.index, cursor.steps) == (index, 0)
    assert cursor.unit.kind == "optimizer"
    cursor.advance_to(len(cursor.order))
    assert (cursor.index, cursor.steps, cursor.unit.kind) == (0, 1, "forward")
