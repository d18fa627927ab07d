"""Copies of layers go one after the other, few pieces at a time where somebody else copies too; no GPU is needed."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.cuda.finetune.layer_copies import LayerCopies
from tests.finetune.copy_link import Link, Mark

SIZE, PIECE = 100, 30


def layer(value: int) -> Any:
    """A layer's bytes."""
    return torch.full((SIZE,), value, dtype=torch.uint8)


def test_few_pieces_are_under_way_at_a_time() -> None:
    """Two at most; each that is done makes room for one more, in the order in which layers were begun."""
    link = Link()
    copies = LayerCopies(link, 2, PIECE)
    first, second = layer(0), layer(0)
    begun = [copies.begin(to, layer(value), None) for to, value in ((first, 1), (second, 2))]
    assert link.pieces == 2
    most = 0
    for done in range(8):
        assert [copy.over for copy in begun] == [done >= 4, False]
        link.go(1)
        copies.feed()
        most = max(most, link.pieces)
    assert most == 2
    assert [copy.over for copy in begun] == [True, True]
    assert first.eq(1).all()
    assert second.eq(2).all()


def test_without_a_limit_a_layer_is_one_copy_at_once() -> None:
    """Nobody has to feed it."""
    link = Link()
    copies = LayerCopies(link, None, PIECE)
    begun = [copies.begin(layer(0), layer(value), None) for value in (1, 2)]
    assert link.pieces == 2
    link.go()
    assert all(copy.over for copy in begun)


def test_a_layer_that_somebody_waits_for_is_enqueued_whole() -> None:
    """With those before it, the limit notwithstanding; those after it stay behind the limit."""
    link = Link()
    copies = LayerCopies(link, 1, PIECE)
    first, second, third = (copies.begin(layer(0), layer(value), None) for value in (1, 2, 3))
    copies.finish(second)
    assert link.pieces == 8
    assert first.loaded is not None
    assert second.loaded is not None
    assert third.loaded is None
    copies.finish(second)
    assert link.pieces == 8


def test_a_cancelled_layer_is_copied_no_further() -> None:
    """The slot's next layer comes behind what was under way, and nobody refers to the cancelled one's bytes."""
    link = Link()
    copies = LayerCopies(link, 1, PIECE)
    slot = layer(0)
    copy = copies.begin(slot, layer(1), None)
    copies.cancel(copy)
    other = copies.begin(slot, layer(2), None)
    while not other.over:
        link.go(1)
        copies.feed()
    assert slot.eq(2).all()
    assert copy.loaded is None
    copies.cancel(other)


def test_a_slot_is_overwritten_only_behind_the_unit_that_reads_it() -> None:
    """The wait comes before the first piece, also where that is enqueued much later."""
    link = Link()
    copies = LayerCopies(link, 1, PIECE)
    slot, read = layer(7), Mark()
    copies.begin(layer(0), layer(1), None)
    copy = copies.begin(slot, layer(2), read)
    for _ in range(10):
        link.go()
        copies.feed()
    assert slot.eq(7).all()
    read.passed = True
    for _ in range(10):
        link.go()
        copies.feed()
    assert copy.over
    assert slot.eq(2).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(("begin", "cancel", "finish", "feed", "go")), st.integers(0, 4))), st.data())
def test_each_slot_ends_with_its_last_layer(steps: list[tuple[str, int]], data: st.DataObject) -> None:
    """Whatever is begun, cancelled and waited for in between, and however slowly the link goes."""
    link = Link()
    most = data.draw(st.sampled_from((None, 1, 3)))
    copies = LayerCopies(link, most, PIECE)
    slots = [layer(0) for _ in range(5)]
    held: dict[int, tuple[int, Any]] = {}
    for value, (what, slot) in enumerate(steps, 1):
        if what == "begin":
            if slot in held:
                copies.cancel(held[slot][1])
            held[slot] = value % 251, copies.begin(slots[slot], layer(value % 251), None)
        elif what == "cancel" and slot in held:
            copies.cancel(held.pop(slot)[1])
        elif what == "finish" and slot in held:
            copies.finish(held[slot][1])
            assert held[slot][1].loaded is not None
        elif what == "go":
            link.go(slot)
        copies.feed()
    for _ in range(100):
        link.go()
        copies.feed()
    assert all(copy.over for _, copy in held.values())
    assert all(slots[slot].eq(value).all() for slot, (value, _) in held.items())


class BrokenLink(Link):
    """Takes no copy while it is ``broken``."""

    broken = False

    def copy(self, to: Any, given: Any) -> None:
        """See `CopyStream`."""
        if self.broken:
            raise RuntimeError("no copy today")
        super().copy(to, given)


@pytest.mark.parametrize("most", [None, 3])
def test_a_layer_that_cannot_be_begun_keeps_no_memory(most: int | None) -> None:
    """The caller has nothing in hand by which it could cancel it."""
    link = BrokenLink()
    link.broken = True
    copies = LayerCopies(link, most, PIECE)
    slot = layer(0)
    gone = weakref.ref(slot)
    with pytest.raises(RuntimeError, match="no copy today"):
        copies.begin(slot, layer(1), None)
    del slot
    assert gone() is None
    link.broken = False
    copies.feed()
    assert link.pieces == 0


def test_a_piece_that_was_not_enqueued_is_not_left_out() -> None:
    """A layer is over when all of its bytes are there."""
    link = BrokenLink()
    copies = LayerCopies(link, 1, PIECE)
    slot = layer(0)
    copy = copies.begin(slot, layer(1), None)
    link.go()
    link.broken = True
    with pytest.raises(RuntimeError, match="no copy today"):
        copies.feed()
    link.broken = False
    for _ in range(10):
        copies.feed()
        link.go()
    assert copy.over
    assert slot.eq(1).all()


@pytest.mark.parametrize("most", [None, 3])
def test_nothing_to_copy_costs_nothing(most: int | None) -> None:
    """`feed` is called between any two looks at the GPU."""
    link = Link()
    LayerCopies(link, most).feed()
    assert not link.queue
