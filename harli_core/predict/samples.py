"""Measured samples: what a profiling run on a GPU recorded, one JSON object a line, repeats kept raw.

The regressions are fitted to these, and the simulator's device model interpolates the same samples directly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import cast, get_args

from harli_core.errors import SampleError
from harli_core.predict.record import Record
from harli_core.types import Split, UnitKind

UNIT_KINDS = cast("tuple[UnitKind, ...]", get_args(UnitKind))
"""All kinds of finetune units."""

LEAST_MS, MOST_MS = 1e-4, 1e6
"""No kernel is as short, nothing that is measured lasts as long; simulating either would not end."""


@dataclass(frozen=True, slots=True)
class Device:
    """The machine, the served model and the splits that were measured (sorted by ``decode_sms``).

    ``graph_batches``: the batch sizes, sorted, that decode graphs are captured for; a batch in between is padded to the next
    one. Empty: every batch runs as it is.
    """

    gpu: str
    total_sms: int
    driver: int
    torch: str
    model: str
    layers: int
    splits: tuple[Split, ...]
    graph_batches: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeSolo:
    """One decode step of ``batch`` requests with ``context_tokens`` tokens each, alone on ``sms`` SMs; every repeat."""

    batch: int
    context_tokens: int
    sms: int
    sm_count_target: bool
    ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Colocated:
    """The same step beside forward and backward units of ``finetune_model`` on the split's other SMs.

    ``decode_ms`` are consecutive steps; ``decode_solo_ms`` is the step alone on the same partition. A unit pair is one
    forward plus one backward unit, alone (``unit_pair_solo_ms``) and beside decode.
    """

    finetune_model: str
    finetune_tokens: int
    batch: int
    context_tokens: int
    split: Split
    sm_count_target: bool
    decode_solo_ms: float
    decode_ms: tuple[float, ...]
    unit_pair_solo_ms: float
    unit_pair_ms: float

    @property
    def overlapped_ms(self) -> tuple[float, ...]:
        """The leading steps of ``decode_ms`` beside which finetuning still ran.

        Read off the data: the finetuning beside them lasted about 40 unit pairs (130 ms or more). Where the steps last
        longer, the last ones fall back to ``decode_solo_ms`` (1.28, 1.28, 1.23, 1.07, 1.01 times, say). There,
        trailing steps with less than 80 % of the largest excess over solo are left out.
        """
        if sum(self.decode_ms) < 120.0:
            return self.decode_ms
        excess_ms = [ms - self.decode_solo_ms for ms in self.decode_ms]
        count = len(excess_ms)
        while count > 1 and excess_ms[count - 1] < 0.8 * max(excess_ms):
            count -= 1
        return self.decode_ms[:count]

    @property
    def slowdown(self) -> float:
        """Median decode time beside finetuning over decode time alone."""
        return median(self.overlapped_ms) / self.decode_solo_ms


@dataclass(frozen=True, slots=True)
class FinetuneUnit:
    """One finetune unit of ``tokens`` tokens of ``model``, one layer, alone on ``sms`` SMs; every repeat."""

    model: str
    unit: UnitKind
    tokens: int
    sms: int
    sm_count_target: bool
    ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepSequence:
    """Consecutive decode steps at a fixed batch and context, alone or (``finetune_sms`` > 0) beside finetuning.

    The clocks settle in the first ~250 steps. The finetuned model is the served one.
    """

    batch: int
    context_tokens: int
    decode_sms: int
    finetune_sms: int
    ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Prefill:
    """The prefill of one whole prompt of ``tokens`` tokens on ``sms`` SMs; every repeat."""

    tokens: int
    sms: int
    ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SampleSource:
    """Where samples came from: a name, how many lines, and the SHA-256 of the lines (each ended by a newline)."""

    name: str
    lines: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Samples:
    """Everything measured for one served model, in the order of the file."""

    sources: tuple[SampleSource, ...]
    device: Device | None = None
    decode_solo: tuple[DecodeSolo, ...] = ()
    colocated: tuple[Colocated, ...] = ()
    finetune_units: tuple[FinetuneUnit, ...] = ()
    sequences: tuple[StepSequence, ...] = ()
    prefill: tuple[Prefill, ...] = ()

    def merged(self, other: Samples) -> Samples:
        """Both together; `SampleError` when both name a device."""
        if self.device is not None and other.device is not None:
            names = " and ".join(source.name for source in (*self.sources, *other.sources))
            raise SampleError(f"{names}: both carry a 'device' line; merge samples of one profiling run only")
        return Samples(
            sources=self.sources + other.sources,
            device=self.device or other.device,
            decode_solo=self.decode_solo + other.decode_solo,
            colocated=self.colocated + other.colocated,
            finetune_units=self.finetune_units + other.finetune_units,
            sequences=self.sequences + other.sequences,
            prefill=self.prefill + other.prefill,
        )


_Sample = Device | DecodeSolo | Colocated | FinetuneUnit | StepSequence | Prefill


def parse_samples(lines: Iterable[str], source: str) -> Samples:
    """Parse lines of JSON; ``source`` is the file's name for errors.

    Raises `SampleError` naming source and line for anything unexpected: a blank line, an unknown kind or field, a
    missing field, a value out of range, a second device, a partition that the device line does not offer.
    """
    digest = hashlib.sha256()
    found: list[tuple[str, _Sample]] = []
    for number, raw in enumerate(lines, start=1):
        where = f"{source}, line {number}"
        line = raw.rstrip("\r\n")
        digest.update(line.encode() + b"\n")
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SampleError(f"{where}: not a line of JSON ({error})") from None
        record = Record(value, where)
        sample = _READERS[record.choice("kind", tuple(_READERS))](record)
        record.close()
        found.append((where, sample))
    if not found:
        raise SampleError(f"{source}: no samples in it")
    devices = [(where, sample) for where, sample in found if isinstance(sample, Device)]
    for where, _ in devices[1:]:
        raise SampleError(f"{where}: a second 'device' line; one profiling run has one")
    device = devices[0][1] if devices else None
    if device is not None:
        for where, sample in found:
            _check_partition(sample, device, where)
    samples = [sample for _, sample in found]
    return Samples(
        sources=(SampleSource(source, len(found), digest.hexdigest()),),
        device=device,
        decode_solo=tuple(s for s in samples if isinstance(s, DecodeSolo)),
        colocated=tuple(s for s in samples if isinstance(s, Colocated)),
        finetune_units=tuple(s for s in samples if isinstance(s, FinetuneUnit)),
        sequences=tuple(s for s in samples if isinstance(s, StepSequence)),
        prefill=tuple(s for s in samples if isinstance(s, Prefill)),
    )


def _check_partition(sample: _Sample, device: Device, where: str) -> None:
    total = device.total_sms
    if isinstance(sample, Device):
        offered = all(split.decode_sms + split.finetune_sms <= total for split in sample.splits)
    elif isinstance(sample, DecodeSolo) or (isinstance(sample, StepSequence) and not sample.finetune_sms):
        sms = sample.sms if isinstance(sample, DecodeSolo) else sample.decode_sms
        offered = sms == total or any(sms == split.decode_sms for split in device.splits)
    elif isinstance(sample, FinetuneUnit):
        offered = sample.sms == total or any(sample.sms == split.finetune_sms for split in device.splits)
    elif isinstance(sample, Colocated):
        offered = sample.split in device.splits
    elif isinstance(sample, StepSequence):
        offered = Split(sample.decode_sms, sample.finetune_sms) in device.splits
    else:
        offered = sample.sms <= total
    if not offered:
        raise SampleError(f"{where}: measured on SMs that no split of the device line ({total} SMs) offers")


def _duration(record: Record, key: str) -> float:
    value = record.positive(key)
    if not LEAST_MS <= value <= MOST_MS:
        raise record.wrong(key, f"a number from {LEAST_MS:g} to {MOST_MS:g}")
    return value


def _durations(record: Record, key: str) -> tuple[float, ...]:
    values = record.positives(key)
    if not LEAST_MS <= min(values) <= max(values) <= MOST_MS:
        raise record.wrong(key, f"a list of numbers from {LEAST_MS:g} to {MOST_MS:g}")
    return values


def _device(record: Record) -> Device:
    pairs = record.integer_pairs("splits")
    if not pairs or list(pairs) != sorted(set(pairs)):
        raise record.wrong("splits", "pairs [decode SMs, finetune SMs], each once, sorted")
    return Device(
        gpu=record.text("gpu"),
        total_sms=record.integer("sms"),
        driver=record.integer("driver"),
        torch=record.text("torch"),
        model=record.text("model"),
        layers=record.integer("layers"),
        splits=tuple(Split(decode_sms, finetune_sms) for decode_sms, finetune_sms in pairs),
        graph_batches=sizes_of_graphs(record),
    )


def sizes_of_graphs(record: Record) -> tuple[int, ...]:
    """The field ``graph_batches``, which may be left out."""
    sizes = record.integers("graph_batches") if record.has("graph_batches") else ()
    if list(sizes) != sorted(set(sizes)):
        raise record.wrong("graph_batches", "batch sizes, each once, sorted")
    return sizes


def _decode_solo(record: Record) -> DecodeSolo:
    return DecodeSolo(
        batch=record.integer("batch"),
        context_tokens=record.integer("context"),
        sms=record.integer("sm"),
        sm_count_target=record.flag("sm_count_target"),
        ms=_durations(record, "ms"),
    )


def _colocated(record: Record) -> Colocated:
    return Colocated(
        finetune_model=record.text("finetune_model"),
        finetune_tokens=record.integer("ft_tokens"),
        batch=record.integer("batch"),
        context_tokens=record.integer("context"),
        split=Split(record.integer("sm_infer"), record.integer("sm_ft")),
        sm_count_target=record.flag("sm_count_target"),
        decode_solo_ms=_duration(record, "decode_solo_ms"),
        decode_ms=_durations(record, "decode_ms"),
        unit_pair_solo_ms=_duration(record, "unit_pair_solo_ms"),
        unit_pair_ms=_duration(record, "unit_pair_ms"),
    )


def _finetune_unit(record: Record) -> FinetuneUnit:
    return FinetuneUnit(
        model=record.text("model"),
        unit=cast("UnitKind", record.choice("unit", UNIT_KINDS)),
        tokens=record.integer("tokens"),
        sms=record.integer("sm"),
        sm_count_target=record.flag("sm_count_target"),
        ms=_durations(record, "ms"),
    )


def _sequence(record: Record) -> StepSequence:
    alone = record.choice("kind", ("decode_sequence", "colocated_sequence")) == "decode_sequence"
    finetune_sms = record.integer("sm_ft", minimum=0)
    if alone is not (finetune_sms == 0):
        raise record.wrong("sm_ft", "0 in a decode_sequence, more in a colocated_sequence")
    return StepSequence(
        batch=record.integer("batch"),
        context_tokens=record.integer("context"),
        decode_sms=record.integer("sm_infer"),
        finetune_sms=finetune_sms,
        ms=_durations(record, "ms"),
    )


def _prefill(record: Record) -> Prefill:
    return Prefill(record.integer("tokens"), record.integer("sm"), _durations(record, "ms"))


_READERS: dict[str, Callable[[Record], _Sample]] = {
    "device": _device,
    "decode_solo": _decode_solo,
    "colocated": _colocated,
    "finetune_unit": _finetune_unit,
    "decode_sequence": _sequence,
    "colocated_sequence": _sequence,
    "prefill": _prefill,
}
