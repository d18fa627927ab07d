"""What a profiler measures with: a decoder and a job whose steps and units it can run one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import islice
from statistics import median
from typing import Any, Protocol

from backends.cuda.serving.instance import Instance
from backends.cuda.serving.partitions import Lane
from harli_core.types import Split, UnitKind

COLD_UNITS = 2
"""The first units of a kind on a stream find clocks and memory not settled, and are not counted."""

AHEAD = 2
"""Units that are enqueued at a time: one that has to wait for the host between its kernels would seem to take longer."""

HOT_UNITS_MS = 1000.0
"""Units on the whole chip for so long before units are measured alone: in a run of minutes they take a tenth longer."""

HOT_STEPS_MS = 200.0
"""The same before decode steps beside units."""

UNITS_WAITED = 20_000
"""A job that gives none of a kind in so many units never will."""

KINDS: tuple[UnitKind, ...] = ("forward", "head_loss", "backward", "optimizer")


class Bench(Protocol):
    """Durations are in milliseconds. ``split`` of `None` is the whole chip for decode, or for a unit."""

    @property
    def splits(self) -> Sequence[Split]:
        """The splits of the GPU, fewest SMs for decode first."""
        ...

    @property
    def total_sms(self) -> int:
        """SMs of the whole chip."""
        ...

    @property
    def unit_tokens(self) -> int:
        """Tokens of a unit."""
        ...

    def put_in_place(self, batch: int, context_tokens: int, steps: int) -> None:
        """``batch`` requests of about ``context_tokens`` tokens each, ready to decode ``steps`` steps; others go."""
        ...

    def decode(self, split: Split | None, steps: int) -> list[float]:
        """``steps`` consecutive decode steps alone."""
        ...

    def decode_beside(self, split: Split, steps: int) -> tuple[list[float], float]:
        """The same beside forward and backward units; and how much longer these took than alone."""
        ...

    def units(self, split: Split | None, repeats: int) -> dict[UnitKind, list[float]]:
        """Each kind of unit alone, on the split's finetune SMs; of the optimizer, the share of one layer."""
        ...

    def prefill(self, tokens: int) -> float:
        """One whole prompt alone on the whole chip."""
        ...


class InstanceBench:
    """Implements `Bench` on an instance that has a job and takes KV as arrived."""

    def __init__(self, instance: Instance) -> None:
        """Raises `ValueError` without a job."""
        if instance.job is None:
            raise ValueError("a profile is measured beside a finetuning job: add one first")
        self._instance = instance
        self._job = instance.job
        self._decoder = instance.decoder
        self._timeline = instance.timeline
        partitions = instance.partitions
        self._lanes: dict[Split | None, Lane] = {lane.split: lane for lane in partitions.lanes}
        self._lanes[None] = partitions.whole
        self.splits: Sequence[Split] = [lane.split for lane in partitions.lanes]
        self.total_sms = partitions.total_sms
        self.unit_tokens = instance.job.unit_tokens
        self._next = 0
        self._alone: dict[tuple[UnitKind, int], float] = {}

    def put_in_place(self, batch: int, context_tokens: int, steps: int) -> None:
        """See `Bench`."""
        self._instance.settle()
        ids = [1] * context_tokens
        for _ in range(batch):
            self._submit(ids, steps + 4)
        while len(self._decoder.running) < batch:
            self._decoder.admit(lambda: None)
            self._decoder.take_prefilled(0.0)

    def decode(self, split: Split | None, steps: int) -> list[float]:
        """See `Bench`; a first step is not counted."""
        return self._decode(self._lanes[split], steps, beside=False)

    def decode_beside(self, split: Split, steps: int) -> tuple[list[float], float]:
        """See `Bench`."""
        self._heat(HOT_STEPS_MS)
        pump, lane = self._job.pump, self._lanes[split]
        sms = split.finetune_sms
        while self._next_kind() not in ("forward", "backward"):
            pump.keep_busy(sms)
        pump.watch()
        decode_ms = self._decode(lane, steps, beside=True)
        while not pump.drained():
            pass
        ratios = [
            took / self._alone[kind, sms]
            for kind, took in pump.watched()
            if kind in ("forward", "backward") and self._alone.get((kind, sms), 0.0) > 0.0
        ]
        return decode_ms, median(ratios) if ratios else 1.0

    def units(self, split: Split | None, repeats: int) -> dict[UnitKind, list[float]]:
        """See `Bench`."""
        self._heat(HOT_UNITS_MS)
        lane = self._lanes[split]
        engine = self._job.engine
        layers = 1 if engine is None else engine.states.layers_together
        found: dict[UnitKind, list[float]] = {kind: [] for kind in KINDS}
        cold = dict.fromkeys(KINDS, COLD_UNITS)
        with closing(self._back_to_back(lane)) as ran:
            for kind, took_ms in islice(ran, UNITS_WAITED):
                if cold[kind]:
                    cold[kind] -= 1
                elif len(found[kind]) < repeats:
                    found[kind].append(round(max(took_ms / (layers if kind == "optimizer" else 1), 1e-4), 4))
                if min(len(durations) for durations in found.values()) >= min(3, repeats):
                    break
            else:
                raise RuntimeError(
                    f"the job gives no unit of some kind: { {kind: len(found[kind]) for kind in KINDS} }"
                )
        for kind, durations in found.items():
            self._alone[kind, lane.split.finetune_sms] = median(durations)
        return found

    def prefill(self, tokens: int) -> float:
        """See `Bench`."""
        self._instance.settle()
        scheduler, decoder = self._decoder.scheduler, self._decoder
        run_batch, marks = scheduler.run_batch, []

        def marked(batch: Any) -> Any:
            begin = self._timeline.mark(decoder.stream)
            result = run_batch(batch)
            marks.append((begin, self._timeline.mark(decoder.stream)))
            return result

        before, decoder.prefill = decoder.prefill, "local"
        scheduler.run_batch = marked
        try:
            self._submit([1] * tokens, 2)
            decoder.admit(lambda: None)
            while not self._timeline.passed(marks[0][1]):
                pass
            decoder.take_prefilled(0.0)
        finally:
            decoder.prefill = before
            scheduler.run_batch = run_batch
        took_ms = self._timeline.between_ms(*marks[0])
        self._instance.settle()
        return round(max(took_ms, 1e-4), 4)

    def _submit(self, ids: list[int], output_tokens: int) -> None:
        self._next += 1
        self._decoder.submit(-self._next, ids, output_tokens, 0.0)

    def _decode(self, lane: Lane, steps: int, *, beside: bool) -> list[float]:
        group = self._instance.partitions.group(lane.split.decode_sms)
        found = []
        for _ in range(steps + 1):
            self._decoder.launch(group)
            while not self._decoder.done():
                if beside:
                    self._job.pump.keep_busy(lane.split.finetune_sms)
            found.append(round(max(self._decoder.finish(0.0).decode_ms, 1e-4), 4))
        return found[1:]

    def _heat(self, for_ms: float) -> None:
        """Units on the whole chip for so long; on a CPU it makes no difference."""
        if self._lanes[None].finetune_stream is None:
            return
        until_ms = self._timeline.now_ms() + for_ms
        with closing(self._back_to_back(self._lanes[None])) as ran:
            for _ in ran:
                if self._timeline.now_ms() >= until_ms:
                    break

    def _back_to_back(self, lane: Lane) -> Generator[tuple[UnitKind, float]]:
        """Units without a gap: the kind and duration of each. What is under way when it is closed is waited for."""
        under_way: deque[tuple[UnitKind, Any, Any]] = deque()
        try:
            while True:
                while len(under_way) < AHEAD:
                    under_way.append(self._enqueued(lane))
                kind, begin, end = under_way.popleft()
                yield kind, self._waited_ms(begin, end)
        finally:
            for _, begin, end in under_way:
                self._waited_ms(begin, end)

    def _enqueued(self, lane: Lane) -> tuple[UnitKind, Any, Any]:
        """Launch the next unit once its frozen layer is there, as serving does; its kind, and the marks around it."""
        kind, stream, work = self._next_kind(), lane.finetune_stream, self._job.pump.work
        assert work is not None
        unit = work.next_unit()
        assert unit is not None, "`_next_kind` looked"
        while not work.ready():
            pass
        begin = self._timeline.mark(stream)
        work.run(unit, stream)
        return kind, begin, self._timeline.mark(stream)

    def _waited_ms(self, begin: Any, end: Any) -> float:
        while not self._timeline.passed(end):
            pass
        return self._timeline.between_ms(begin, end)

    def _next_kind(self) -> UnitKind:
        unit = self._job.pump.next_unit()
        if unit is None:
            raise RuntimeError(f"the job stopped: {self._job.pump.failure}")
        return unit.kind
