"""How long things take on the simulated GPU: interpolated from the measured samples, never from a regression.

The policy's predictor is a regression on the same measurements; the difference between the two is the policy's
prediction error, as on hardware. What lies outside the measured range is prolonged linearly and counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from backends.sim.curve import BatchCurves, Curve, product
from backends.sim.noise import RecordedNoise
from harli_core.errors import SampleError
from harli_core.predict.samples import Device, Samples
from harli_core.predict.solo import launched_batch
from harli_core.types import Capabilities, Split, UnitKind
from harli_core.working_set import LOSS_CHUNK_TOKENS

WARM_UP_STEPS = 250
"""Steps at the start of a recorded sequence in which the GPU's clocks still settle."""


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """All that depends on (decode SMs, split, batch) alone; made once for each.

    ``step_ms`` over total KV tokens, slowdown included; ``contexts`` the measured range of tokens a request (`None`:
    the batch lies outside); ``colocated``: whether the slowdown was measured at such batches (`None`: nothing runs beside);
    units take ``unit_slowdown`` times longer beside decode.
    """

    batch: int
    noise: RecordedNoise
    step_ms: Curve
    contexts: tuple[float, float] | None
    colocated: bool | None
    unit_slowdown: float

    def decode_ms(self, instance: int, step: int, kv_tokens: int, count: int) -> list[float]:
        """Duration of ``count`` consecutive decode steps from ``step`` on; KV grows by the batch in each."""
        return self.step_ms.run(kv_tokens, self.batch, self.noise.take(instance, step, count))


class DeviceModel:
    """One kind of GPU with one served and one finetuned model."""

    def __init__(self, samples: Samples, finetune_model: str, unit_tokens: int, seed: int) -> None:
        """``unit_tokens`` is the micro-batch length of finetuning, one of those measured (else `SampleError`)."""
        if samples.device is None:
            raise SampleError(f"{samples.sources[0].name}: no 'device' line, so the splits are not known")
        device = samples.device
        self.capabilities = Capabilities(device.gpu, device.total_sms, device.splits)
        self.extrapolated: dict[str, int] = defaultdict(int)
        self.evaluated: dict[str, int] = defaultdict(int)
        self._graph_batches = device.graph_batches
        self._unit_tokens = unit_tokens
        self._source = samples.sources[0].name
        self._solo = _solo_curves(samples)
        self._slowdown, self._unit_slowdown = _colocated_curves(samples, finetune_model, unit_tokens)
        _check_partitions(samples, device, self._solo, self._slowdown)
        self._units = _unit_durations(samples, finetune_model, unit_tokens)
        self._prefill = _prefill_curve(samples, device.total_sms)
        self._solo_noise, self._shared_noise = _step_noise(samples, device.splits, seed, self._shared_ms)
        # Without the optimizer's unit: a turn is hardly made of it.
        long_units = [unit for unit in samples.finetune_units if unit.unit != "optimizer"]
        spread = [ratio for unit in long_units for ratio in _over_median(unit.ms, unit.ms)]
        self._turn_noise = RecordedNoise(spread, seed, 1000)
        self._points: dict[tuple[int, bool, int], BatchPoint] = {}

    def at(self, decode_sms: int, beside: Split | None, batch: int) -> BatchPoint:
        """Decode of ``batch`` requests on ``decode_sms`` SMs, with finetuning on the rest of ``beside``, or alone."""
        key = (decode_sms, beside is not None, batch)
        known = self._points.get(key)
        if known is None:
            known = self._points[key] = self._point(decode_sms, beside, batch)
        return known

    def count_steps(self, point: BatchPoint, kv_tokens: int, count: int) -> None:
        """Count ``count`` steps that really ran, and whether their durations were measured or prolonged."""
        measured, batch = point.contexts, point.batch
        self.evaluated["decode"] += count
        if measured is None or not measured[0] * batch <= kv_tokens <= measured[1] * batch:
            self.extrapolated["decode"] += count
        if point.colocated is not None:
            self.evaluated["colocated"] += count
            if not point.colocated:
                self.extrapolated["colocated"] += count

    def alone_ms(self, instance: int, step: int, batch: int, kv_tokens: int) -> float:
        """What this very step would have taken on the whole chip without finetuning; judges violations."""
        solo_ms = self.at(self.capabilities.total_sms, None, batch).step_ms.at(kv_tokens)
        return solo_ms * self._solo_noise.take(instance, step, 1)[0]

    def unit_ms(self, kind: UnitKind, sms: int) -> float:
        """Duration of one finetune unit alone on ``sms`` SMs."""
        try:
            return self._units[kind, sms]
        except KeyError:
            unit = f"{kind!r} unit of {self._unit_tokens} tokens on {sms} SMs"
            raise SampleError(f"{self._source}: no sample of a {unit}") from None

    def turn_noise(self, instance: int, step: int, count: int) -> list[float]:
        """Ratios of a turn's real to its nominal duration in ``count`` steps from ``step`` on."""
        return self._turn_noise.take(instance, step, count)

    def prefill_ms(self, tokens: int) -> float:
        """Duration of one whole prompt on a prefill GPU."""
        self.evaluated["prefill"] += 1
        if not self._prefill.xs[0] <= tokens <= self._prefill.xs[-1]:
            self.extrapolated["prefill"] += 1
        return max(self._prefill.at(tokens), 0.0)

    def _shared_ms(self, split: Split, batch: int, kv_tokens: int) -> float:
        return self._solo[split.decode_sms].curve(batch).at(kv_tokens) * self._slowdown_at(split, batch).at(kv_tokens)

    def _slowdown_at(self, split: Split, batch: int) -> Curve:
        """Beyond the measured batches that of the nearest one."""
        slowdowns = self._slowdown[split]
        return slowdowns.curve(min(max(batch, slowdowns.batches[0]), slowdowns.batches[-1]))

    def _point(self, decode_sms: int, beside: Split | None, batch: int) -> BatchPoint:
        launched, curves = launched_batch(batch, self._graph_batches), self._solo[decode_sms]
        solo_ms, contexts = curves.curve(launched), curves.measured_contexts(launched)
        if beside is None:
            return BatchPoint(batch, self._solo_noise, solo_ms, contexts, colocated=None, unit_slowdown=1.0)
        batches = self._slowdown[beside].batches
        return BatchPoint(
            batch,
            self._shared_noise[beside],
            product(solo_ms, self._slowdown_at(beside, launched)),
            contexts,
            batches[0] <= batch <= batches[-1],
            self._unit_slowdown[beside].at(batch),
        )


def _medians(points: Iterable[tuple[int, float, float]]) -> dict[int, dict[float, float]]:
    """Points (batch, total KV tokens, value) by batch and tokens; several values of one point become their median."""
    grouped: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for batch, kv_tokens, value in points:
        grouped[batch][kv_tokens].append(value)
    return {
        batch: {kv_tokens: median(found[kv_tokens]) for kv_tokens in sorted(found)}
        for batch, found in sorted(grouped.items())
    }


def _solo_curves(samples: Samples) -> dict[int, BatchCurves]:
    points: dict[int, list[tuple[int, float, float]]] = defaultdict(list)
    for solo in samples.decode_solo:
        points[solo.sms].append((solo.batch, float(solo.batch * solo.context_tokens), median(solo.ms)))
    return {
        sms: BatchCurves({batch: Curve(tuple(at), tuple(at.values())) for batch, at in _medians(found).items()})
        for sms, found in points.items()
    }


def _colocated_curves(
    samples: Samples, finetune_model: str, unit_tokens: int
) -> tuple[dict[Split, BatchCurves], dict[Split, Curve]]:
    """Slowdown of decode (over total KV tokens, a batch each) and of units (over the batch), a split each."""
    of_model = [point for point in samples.colocated if point.finetune_model == finetune_model]
    chosen = [point for point in of_model if point.finetune_tokens == unit_tokens] or of_model
    if not chosen:
        raise SampleError(f"{samples.sources[0].name}: no co-located samples with {finetune_model!r} finetuning")
    decode: dict[Split, list[tuple[int, float, float]]] = defaultdict(list)
    units: dict[Split, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for point in chosen:
        decode[point.split].append((point.batch, float(point.batch * point.context_tokens), point.slowdown))
        units[point.split][point.batch].append(point.unit_pair_ms / point.unit_pair_solo_ms)
    decode_curves = {
        split: BatchCurves({batch: Curve.level_ends(at) for batch, at in _medians(found).items()})
        for split, found in decode.items()
    }
    unit_curves = {
        split: Curve.level_ends({float(batch): median(ratios) for batch, ratios in found.items()})
        for split, found in units.items()
    }
    return decode_curves, unit_curves


def _unit_durations(samples: Samples, finetune_model: str, unit_tokens: int) -> dict[tuple[UnitKind, int], float]:
    """(kind, SMs) to milliseconds. Head + loss is computed in chunks, so a longer unit is several measured ones."""
    found: dict[tuple[UnitKind, int], list[float]] = defaultdict(list)
    for unit in samples.finetune_units:
        if unit.model != finetune_model:
            continue
        if unit.tokens == unit_tokens:
            found[unit.unit, unit.sms].extend(unit.ms)
        elif unit.unit == "head_loss" and unit.tokens == LOSS_CHUNK_TOKENS and unit_tokens % LOSS_CHUNK_TOKENS == 0:
            found[unit.unit, unit.sms].extend(ms * (unit_tokens // LOSS_CHUNK_TOKENS) for ms in unit.ms)
        elif unit.unit == "optimizer":
            found[unit.unit, unit.sms].extend(unit.ms)
    if not found:
        raise SampleError(f"{samples.sources[0].name}: no finetune units of {finetune_model!r}, {unit_tokens} tokens")
    return {key: median(ms) for key, ms in found.items()}


def _prefill_curve(samples: Samples, total_sms: int) -> Curve:
    """Duration over prompt tokens on a whole chip; several samples of one length become their median."""
    found: dict[float, list[float]] = defaultdict(list)
    for prefill in samples.prefill:
        if prefill.sms == total_sms:
            found[float(prefill.tokens)].extend(prefill.ms)
    if not found:
        raise SampleError(f"{samples.sources[0].name}: no prefill samples on all {total_sms} SMs")
    return Curve(tuple(sorted(found)), tuple(median(found[tokens]) for tokens in sorted(found)))


def _check_partitions(
    samples: Samples, device: Device, solo: Mapping[int, object], beside: Mapping[Split, object]
) -> None:
    """Raise `SampleError` for the first partition without decode samples, which `fit_profile` would have refused too."""
    name = samples.sources[0].name
    for sms in (device.total_sms, *(split.decode_sms for split in device.splits)):
        if sms not in solo:
            raise SampleError(f"{name}: no decode_solo samples on {sms} SMs")
    for split in device.splits:
        if split not in beside:
            raise SampleError(f"{name}: no co-located samples on {split.decode_sms}+{split.finetune_sms} SMs")


def _over_median(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    middle = median(reference)
    return [value / middle for value in values]


def _step_noise(
    samples: Samples, splits: tuple[Split, ...], seed: int, between_ms: Callable[[Split, int, int], float]
) -> tuple[RecordedNoise, dict[Split, RecordedNoise]]:
    """Solo and, for each split, co-located residuals: sequence over the short sample of the same point.

    Sequences run 0 to 23 % above the short samples once clocks have settled; a production GPU lives there, so the
    level is kept. Where the very point has no short sample it is ``between_ms(split, batch, KV tokens)``, between those that
    there are. A split without a sequence of its own takes that of the nearest decode partition.
    """
    solo: list[float] = []
    shared: dict[int, list[float]] = {}
    for sequence in samples.sequences:
        steady = sequence.ms[WARM_UP_STEPS:]
        if not steady:
            continue
        if sequence.finetune_sms == 0:
            solo = _over_median(steady, steady)
            continue
        split = Split(sequence.decode_sms, sequence.finetune_sms)
        if split not in splits:
            raise SampleError(
                f"{samples.sources[0].name}: a sequence on {split.decode_sms}+{split.finetune_sms} SMs, which is no split"
            )
        short = [
            median(point.overlapped_ms)
            for point in samples.colocated
            if (point.batch, point.context_tokens) == (sequence.batch, sequence.context_tokens)
            and point.split == split
            and point.finetune_model == samples.device.model
        ] if samples.device else []  # fmt: skip
        short = short or [between_ms(split, sequence.batch, sequence.batch * sequence.context_tokens)]
        shared[sequence.decode_sms] = _over_median(steady, short)
    if not solo or not shared:
        raise SampleError(
            f"{samples.sources[0].name}: no recorded step sequences of more than {WARM_UP_STEPS} steps, alone and beside "
            "finetuning, so no spread to draw from"
        )
    nearest = {split: min(shared, key=lambda sms: (abs(sms - split.decode_sms), sms)) for split in splits}
    noise = {split: RecordedNoise(shared[nearest[split]], seed, index) for index, split in enumerate(splits, start=1)}
    return RecordedNoise(solo, seed, 0), noise
