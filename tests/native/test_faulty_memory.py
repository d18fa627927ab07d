"""Any driver call may fail at any time, and work on streams is late: nothing changes hands halfway, no byte is lost."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backends.cuda._native import HostDriver
from backends.cuda.memory.provider import Lending, NativeProvider
from harli_core.errors import DriverCallError, HarliError, MemoryAccountingError, OutOfMemoryError
from harli_core.memory.geometry import GridGeometry

if TYPE_CHECKING:
    from backends.cuda._native import Call

GRID = GridGeometry(row_tokens=4, columns=2, rows=4, block_bytes=8192)
KV, SCRUB = 0, 3
STREAMS = (KV, 1, 2, SCRUB)
ROWS = st.integers(0, GRID.rows - 1)
CALLS: tuple[Call, ...] = (
    "map", "set_access", "unmap", "fill", "event_create", "event_record", "event_query",
)  # fmt: skip


@dataclass
class Tensor:
    """A live allocation; ``pattern`` is what its own stream writes there, unless a fault kept it from being written."""

    at: int
    size: int
    stream: int
    pattern: int | None


class FaultyMemory(RuleBasedStateMachine):
    """A provider on held streams; after each call that raises, the tables are as before it."""

    @initialize(lending=st.sampled_from(["alias", "remap"]), late=st.booleans())
    def start(self, lending: Lending, late: bool) -> None:
        """Commit everything, with the first fills done or still to come."""
        self.driver = HostDriver(4096)
        self.provider = NativeProvider(self.driver, lending, scrub="poison", kv_stream=KV)
        self.provider.reserve(GRID)
        for stream in STREAMS:
            if late or stream != KV:
                self.driver.hold(stream)
        for row in range(GRID.rows):
            self.provider.commit_row(row)
        self.driver.hold(KV)
        self.kv = dict.fromkeys(range(GRID.rows), 0xFF)  # what each row of KV's holds once its stream is done
        self.kv_writing: set[int] = set()  # rows that KV may still be writing: its caller must not lend them
        self.tensors: list[Tensor] = []
        self.patterns = 0

    def teardown(self) -> None:
        """Everything is given back, whatever the state."""
        if hasattr(self, "driver"):
            self.driver.clear_faults()
            for stream in STREAMS:
                self.driver.let_go(stream)
            self.provider.release()
            assert self.driver.use() == (0, 0, 0, 0)

    def state(self) -> object:
        """All that a failed call must leave alone."""
        pool, space = self.provider.pool.stats(), self.provider.space
        return pool["rows_lent"], pool["rows_stranded"], space.rows(), space.rows_open(), space.stats()["live"]

    def tried(self, action: Callable[[], object]) -> bool:
        """Whether ``action`` worked; if not, nothing changed."""
        before = self.state()
        try:
            action()
        except HarliError:
            assert self.state() == before
            return False
        return True

    def pattern(self) -> int:
        """A byte that is not the poison."""
        self.patterns = self.patterns % 250 + 1
        return self.patterns

    @rule(call=st.sampled_from(CALLS), nth=st.integers(0, 6))
    def arm(self, call: Call, nth: int) -> None:
        """One of the next calls of a kind will fail."""
        self.driver.fail(call, nth)

    @rule(row=ROWS)
    def lend(self, row: int) -> None:
        """A row that KV does not use goes to finetuning."""
        if row in self.kv_writing:
            return
        if self.tried(lambda: self.provider.lend_row(row)):
            del self.kv[row]

    @rule(row=ROWS)
    def give_back(self, row: int) -> None:
        """A row comes back to KV, as poison; never while a tensor is in it."""
        if self.tried(lambda: self.provider.return_row(row)):
            self.kv[row] = 0xFF

    @rule(row=ROWS, stream=st.sampled_from((KV, SCRUB)))
    def scrub(self, row: int, stream: int) -> None:
        """A row is filled ahead of its return."""
        self.tried(lambda: self.provider.scrub(row, stream))

    @rule(row=ROWS, opened=st.booleans())
    def open_or_close(self, row: int, opened: bool) -> None:
        """A row is closed to allocation, or opened again though it was scrubbed."""
        space = self.provider.space
        self.tried(lambda: space.open_row(row) if opened else space.close_row(row))

    @rule(size=st.integers(1, 12000).map(lambda size: 2 * size), stream=st.sampled_from((KV, 1, 2, SCRUB)))
    def allocate(self, size: int, stream: int) -> None:
        """A tensor is written on its stream, some time; a driver error while looking for room leaves no trace."""
        before = self.state()
        try:
            at = self.provider.space.allocate(size, stream)
        except (OutOfMemoryError, DriverCallError):
            assert self.state() == before
            return
        tensor = Tensor(at, size, stream, None)
        self.tensors.append(tensor)
        pattern = self.pattern()
        try:
            self.driver.fill(at, 0x0101 * pattern, size, stream)
        except DriverCallError:
            return
        tensor.pattern = pattern

    @precondition(lambda self: self.tensors)
    @rule(data=st.data(), stream=st.sampled_from((1, 2)))
    def free(self, data: st.DataObject, stream: int) -> None:
        """A tensor goes, on any stream; no driver call is made for it."""
        tensor = data.draw(st.sampled_from(self.tensors))
        self.tensors.remove(tensor)
        self.provider.space.free(tensor.at, stream)

    @rule(row=ROWS)
    def write_kv(self, row: int) -> None:
        """KV writes a row of its own, on its stream."""
        if row not in self.kv:
            return
        pattern = self.pattern()
        for column in range(GRID.columns):
            try:
                at = self.provider.pool.kv_address(column, row)
                self.driver.fill(at, 0x0101 * pattern, GRID.block_bytes, KV)
            except DriverCallError:
                self.driver.clear_faults()
                self.driver.fill(at, 0x0101 * pattern, GRID.block_bytes, KV)
        self.kv[row] = pattern
        self.kv_writing.add(row)

    @rule()
    def poll(self) -> None:
        """A step boundary."""
        self.tried(self.provider.space.poll)

    @rule(stream=st.sampled_from(STREAMS), pieces=st.integers(1, 5))
    def complete(self, stream: int, pieces: int) -> None:
        """A stream gets on."""
        self.driver.complete(stream, pieces)
        if stream == KV and self.driver.outstanding(KV) == 0:
            self.kv_writing.clear()

    @rule()
    def everything_lands(self) -> None:
        """Once all streams are done, every tensor and every row of KV holds what its owner wrote last."""
        for stream in STREAMS:
            self.driver.let_go(stream)
            self.driver.hold(stream)
        self.kv_writing.clear()
        for tensor in self.tensors:
            if tensor.pattern is not None:
                assert ctypes.string_at(tensor.at, tensor.size) == bytes([tensor.pattern]) * tensor.size
        for row, pattern in self.kv.items():
            for column in range(GRID.columns):
                content = ctypes.string_at(self.provider.pool.kv_address(column, row), GRID.block_bytes)
                assert content == bytes([pattern]) * GRID.block_bytes, (row, column)

    @invariant()
    def tables_agree(self) -> None:
        """Pool, tensor space and model say the same."""
        self.provider.check_integrity()
        lent = set(self.provider.space.rows())
        assert lent == set(range(GRID.rows)) - set(self.kv)
        assert self.provider.space.stats()["live"] == len(self.tensors)
        assert self.provider.pool.stats()["rows_stranded"] == 0
        for row in self.kv:
            try:
                self.provider.space.remove_row(row)
            except MemoryAccountingError:
                continue
            raise AssertionError("a row of KV was in the tensor space")


TestFaultyMemory = FaultyMemory.TestCase
TestFaultyMemory.settings = settings(max_examples=200, stateful_step_count=40, deadline=None, database=None)
