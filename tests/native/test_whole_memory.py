"""Everything together on real bytes: KV, lending, tensors on held streams, reclaim and compaction against a plain model."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backends.cuda._native import HostDriver
from backends.cuda.memory.compaction import HostCompactor
from backends.cuda.memory.provider import Lending, NativeProvider
from backends.cuda.memory.reclaim import Reclaim
from backends.cuda.memory.views import kv_array
from harli_core.errors import MemoryAccountingError, OutOfMemoryError
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.unified import UnifiedAllocator

GRID = GridGeometry(row_tokens=4, columns=3, rows=6, block_bytes=16384)
ENTRY = GRID.block_bytes // GRID.row_tokens
STREAMS = (1, 2, 3)
SCRUB_STREAM = 3


@dataclass
class Tensor:
    """A live allocation: what it holds once ``written`` (stream, position) is reached."""

    at: int
    size: int
    stream: int
    pattern: int
    written: tuple[int, int]


@dataclass
class Freed:
    """Bytes that were freed on ``home``, and the positions that other streams than that must reach before any reuse."""

    at: int
    end: int
    home: tuple[int, int]
    others: list[tuple[int, int]]


@dataclass
class Streams:
    """How far the held streams have come, as the test knows it."""

    submitted: dict[int, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))
    completed: dict[int, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))

    def passed(self, mark: tuple[int, int]) -> bool:
        """Whether the stream of a mark has reached its position."""
        return self.completed[mark[0]] >= mark[1]


class WholeMemory(RuleBasedStateMachine):
    """Work on streams happens late: memory that is reused too early is overwritten by the fill of its last holder."""

    @initialize(lending=st.sampled_from(["alias", "remap"]))
    def start(self, lending: Lending) -> None:
        """Commit the grid and hold all streams."""
        self.driver = HostDriver(4096)
        self.provider = NativeProvider(self.driver, lending, scrub="poison", kv_stream=0)
        self.memory = UnifiedAllocator(GRID, self.provider)
        self.reclaim = Reclaim(self.memory, self.provider, SCRUB_STREAM)
        self.columns = [kv_array(self.provider.pool, column, ENTRY) for column in range(GRID.columns)]
        self.compactor = HostCompactor(self.provider.pool, GRID)
        self.streams = Streams()
        for stream in STREAMS:
            self.driver.hold(stream)
        self.tensors: list[Tensor] = []
        self.freed: list[Freed] = []
        self.tokens: dict[int, int] = {}  # slot -> pattern
        self.next_pattern = 1

    def teardown(self) -> None:
        """Give everything back, whatever the state: nothing may be left."""
        if hasattr(self, "driver"):
            for stream in STREAMS:
                self.driver.let_go(stream)
            for _ in range(3):
                self.reclaim.poll()
            self.reclaim.close()
            self.memory.release()
            del self.reclaim, self.compactor, self.columns
            self.provider.release()
            assert self.driver.use() == (0, 0, 0, 0)

    def pattern(self) -> int:
        """A byte not used recently, never that of the poison."""
        self.next_pattern = self.next_pattern % 250 + 1
        return self.next_pattern

    def fill(self, tensor: Tensor, stream: int) -> None:
        """Write the whole tensor on a stream, some time."""
        tensor.pattern = self.pattern()
        self.driver.fill(tensor.at, tensor.pattern * 0x0101, tensor.size, stream)
        self.streams.submitted[stream] += 1
        tensor.written = (stream, self.streams.submitted[stream])

    @rule(rows=st.integers(0, 3))
    def lend(self, rows: int) -> None:
        """Free rows go to finetuning."""
        self.memory.lend_rows(rows)

    @rule(
        size=st.one_of(st.integers(1, 3000), st.integers(1, 80000)).map(lambda size: 2 * size),
        stream=st.sampled_from(STREAMS[:2]),
    )
    def allocate(self, size: int, stream: int) -> None:
        """A tensor comes from open lent rows, overlaps no other, and nothing that its stream may not reuse yet."""
        space = self.provider.space
        try:
            at = space.allocate(size, stream)
        except OutOfMemoryError:
            assert space.stats()["largest_allocatable_bytes"] < -(-size // 2048) * 2048
            return
        end = at + size
        assert all(end <= other.at or other.at + other.size <= at for other in self.tensors)
        first = self.provider.pool.general_address(0, 0)
        rows = range((at - first) // GRID.row_bytes, (end - 1 - first) // GRID.row_bytes + 1)
        assert set(rows) <= set(self.memory.grid.lent_rows())
        for freed in self.freed:
            if freed.at < end and at < freed.end:
                assert all(self.streams.passed(mark) for mark in freed.others)
                assert freed.home[0] == stream or self.streams.passed(freed.home)
        tensor = Tensor(at, size, stream, 0, (stream, 0))
        self.fill(tensor, stream)
        self.tensors.append(tensor)

    @precondition(lambda self: self.tensors)
    @rule(data=st.data(), stream=st.sampled_from(STREAMS[:2]), declare=st.booleans())
    def write_again(self, data: st.DataObject, stream: int, declare: bool) -> None:
        """A tensor is written on its own stream, or on another one after `record_use` once its last write is done."""
        tensor = data.draw(st.sampled_from(self.tensors))
        if stream != tensor.stream:
            if not declare or not self.streams.passed(tensor.written):
                return
            self.provider.space.record_use(tensor.at, stream)
            self.fill(tensor, stream)
        elif tensor.written[0] == stream or self.streams.passed(tensor.written):
            self.fill(tensor, stream)

    @precondition(lambda self: self.tensors)
    @rule(data=st.data(), on_other=st.booleans())
    def free(self, data: st.DataObject, on_other: bool) -> None:
        """A tensor goes, on its stream or another, with writes still to come; a second free is refused."""
        tensor = data.draw(st.sampled_from(self.tensors))
        self.give_up(tensor, 3 - tensor.stream if on_other else tensor.stream)
        try:
            self.provider.space.free(tensor.at, tensor.stream)
        except MemoryAccountingError:
            return
        raise AssertionError("freed twice")

    def give_up(self, tensor: Tensor, stream: int) -> None:
        """Free a tensor and remember what its bytes wait for."""
        self.tensors.remove(tensor)
        self.provider.space.free(tensor.at, stream)
        others = [tensor.written] if tensor.written[0] != stream else []
        if tensor.stream != stream:
            others.append((tensor.stream, self.streams.submitted[tensor.stream]))
        home = (stream, self.streams.submitted[stream])
        self.freed.append(Freed(tensor.at, tensor.at + tensor.size, home, others))

    @rule(stream=st.sampled_from(STREAMS), pieces=st.integers(1, 4))
    def complete(self, stream: int, pieces: int) -> None:
        """A stream gets on with its work."""
        outstanding = self.driver.outstanding(stream)
        self.driver.complete(stream, pieces)
        if stream != SCRUB_STREAM:
            self.streams.completed[stream] += min(pieces, outstanding)

    @rule()
    def poll(self) -> None:
        """A step boundary: rows whose fences and fill have passed come back as poison, in every column."""
        for row in self.reclaim.poll():
            for column in self.columns:
                assert (column[row * GRID.row_tokens : (row + 1) * GRID.row_tokens] == 0xFF).all()

    @rule(rows=st.integers(1, 3), generous=st.booleans())
    def ask_back(self, rows: int, generous: bool) -> None:
        """Inference wants rows; finetuning gives tensors up, or not."""

        def give_up() -> bool:
            if not (generous and self.tensors):
                return False
            self.give_up(self.tensors[-1], self.tensors[-1].stream)
            return True

        assert len(self.reclaim.request(rows, give_up)) <= rows

    @rule(tokens=st.integers(1, 9))
    def decode(self, tokens: int) -> None:
        """KV takes slots, which are never in a lent row, and writes all columns."""
        if not self.memory.can_allocate_tokens(tokens):
            return
        for slot in self.memory.allocate_tokens(tokens).tolist():
            self.tokens[slot] = self.pattern()
            for column in self.columns:
                column[slot] = self.tokens[slot]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def finish_request(self, data: st.DataObject) -> None:
        """Some tokens go."""
        gone = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), min_size=1, unique=True))
        self.memory.free_tokens(np.array(gone, dtype=np.int32))
        for slot in gone:
            del self.tokens[slot]

    @precondition(lambda self: self.tokens)
    @rule(rows=st.integers(1, 3))
    def compact(self, rows: int) -> None:
        """Tokens move down with their bytes, and the table of slots follows."""
        table = np.array([[-1, *sorted(self.tokens)]], dtype=np.int32)
        patterns = [self.tokens[slot] for slot in sorted(self.tokens)]
        compaction = self.memory.compact(rows)
        self.compactor.apply(compaction, table)
        assert table[0, 0] == -1
        self.tokens = dict(zip(table[0, 1:].tolist(), patterns, strict=True))

    @invariant()
    def every_byte_is_where_it_should_be(self) -> None:
        """Tokens in the KV view, and tensors whose writes are done; all tables agree."""
        for slot, pattern in self.tokens.items():
            for column in self.columns:
                assert column[slot, 0] == column[slot, -1] == pattern
        for tensor in self.tensors:
            if self.streams.passed(tensor.written):
                content = ctypes.string_at(tensor.at, tensor.size)
                assert content == bytes([tensor.pattern]) * tensor.size
        self.memory.check_integrity()
        self.provider.check_integrity()
        self.reclaim.check_integrity()
        stats = self.provider.space.stats()
        held_bytes = len(self.provider.space.rows()) * GRID.row_bytes
        assert stats["used_bytes"] + stats["free_bytes"] + stats["pending_bytes"] == held_bytes
        assert stats["live"] == len(self.tensors)
        assert stats["requested_bytes"] == sum(tensor.size for tensor in self.tensors)


TestWholeMemory = WholeMemory.TestCase
TestWholeMemory.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, database=None)
