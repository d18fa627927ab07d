"""Fitting a profile to samples: medians of the repeats, every candidate of every stage, the winner by cross-validation.

The only module that uses scikit-learn, and it imports it only when a fit runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from harli_core.errors import SampleError
from harli_core.predict import colocated, finetune, solo
from harli_core.predict.profile import Profile, Provenance, StageError
from harli_core.predict.regression import LeastSquares, left_out_folds, summarise
from harli_core.predict.samples import UNIT_KINDS, Colocated, Device, Samples
from harli_core.predict.tail import SETTLING_STEPS, residual_tail
from harli_core.types import Split, UnitKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MARGIN = 0.02
"""A later candidate replaces an earlier, simpler one only when its cross-validated mean error is this part smaller."""

_DIGITS = 12
"""Significant digits kept of a coefficient, so that a profile does not depend on the last bits of a solver."""

Model = TypeVar("Model")


class _Regression(Protocol):
    """What is used of scikit-learn, which ships no types."""

    coef_: NDArray[np.float64]

    def fit(self, rows: NDArray[np.float64], targets: NDArray[np.float64], /) -> object: ...


def least_squares() -> LeastSquares:
    """The solver handed to the stages: scikit-learn's, in relative error, columns scaled to at most 1."""
    import numpy as np  # noqa: PLC0415  (only fitting needs it)
    from sklearn.linear_model import LinearRegression  # noqa: PLC0415

    def solve(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> tuple[float, ...]:
        goal = np.asarray(targets, dtype=np.float64)
        features = np.asarray(rows, dtype=np.float64) / goal[:, None]
        scale = np.abs(features).max(axis=0)
        scale[scale == 0.0] = 1.0
        regression = cast("_Regression", LinearRegression(fit_intercept=False))
        regression.fit(features / scale, np.ones_like(goal))
        found = cast("list[float]", (regression.coef_ / scale).tolist())
        return tuple(float(f"{coefficient:.{_DIGITS}g}") for coefficient in found)

    return solve


def fit_profile(samples: Samples, finetune_model: str) -> Profile:
    """Fit all stages for the samples' served model beside ``finetune_model``.

    Raises `SampleError` when a kind of sample that the fit needs is missing.
    """
    device = samples.device
    if device is None:
        raise SampleError(f"{_names(samples)}: no 'device' line, so the SM count and the splits are unknown")
    solve = least_squares()
    beside_decode = tuple(s for s in samples.colocated if s.finetune_model == finetune_model)
    _require(samples, device, beside_decode, finetune_model)
    try:
        solo_model, solo_stages = _fit_solo(samples, solve)
    except SampleError as error:
        raise SampleError(f"{_names(samples)}: {error}") from None
    colocated_model, colocated_stages = _fit_colocated(beside_decode, device, solve)
    finetune_model_fit, unit_stages = _fit_finetune(samples, beside_decode, device, finetune_model, solve)
    end_to_end = _end_to_end(samples, beside_decode, device, (solo_model, colocated_model), solve)
    return Profile(
        gpu=device.gpu,
        total_sms=device.total_sms,
        splits=device.splits,
        model=device.model,
        finetune_model=finetune_model,
        solo=solo_model,
        colocated=colocated_model,
        finetune=finetune_model_fit,
        tail=residual_tail(samples.sequences, device.total_sms, solo_model, colocated_model),
        errors=(*solo_stages, *colocated_stages, end_to_end, *unit_stages),
        provenance=Provenance(device.driver, device.torch, samples.sources),
        graph_batches=device.graph_batches,
    )


def solo_points(samples: Samples) -> list[solo.SoloPoint]:
    """Medians of the solo samples."""
    return [solo.SoloPoint(s.sms, s.batch, s.batch * s.context_tokens, median(s.ms)) for s in samples.decode_solo]


def colocated_points(samples: Sequence[Colocated], total_sms: int) -> list[colocated.ColocatedPoint]:
    """Slowdowns of the co-run samples, over the steps beside which finetuning really ran."""
    return [
        colocated.ColocatedPoint(
            s.split.decode_sms / total_sms,
            s.split.finetune_sms / total_sms,
            s.batch,
            s.batch * s.context_tokens,
            s.slowdown,
        )
        for s in samples
    ]


def _names(samples: Samples) -> str:
    return ", ".join(source.name for source in samples.sources)


def _require(samples: Samples, device: Device, beside_decode: Sequence[Colocated], finetune_model: str) -> None:
    """Raise `SampleError` for the first kind of sample that is missing."""
    missing: list[str] = []
    solo_sms = {s.sms for s in samples.decode_solo}
    for sms in sorted({device.total_sms, *(split.decode_sms for split in device.splits)} - solo_sms):
        missing.append(f"decode_solo on {sms} SMs")
    for split in sorted(set(device.splits) - {s.split for s in beside_decode}):
        missing.append(f"colocated with {finetune_model!r} on {split.decode_sms} + {split.finetune_sms} SMs")
    # Cross-validation leaves out one of each.
    if len(device.splits) < 2:
        missing.append("colocated on a second split")
    if len({s.batch for s in beside_decode}) == 1:
        missing.append(f"colocated with {finetune_model!r} at a second batch size")
    for kind in UNIT_KINDS:
        counts = {s.sms for s in samples.finetune_units if s.unit == kind and s.model == finetune_model}
        if len(counts) < 2:
            missing.append(f"finetune_unit {kind!r} of {finetune_model!r}{' on a second SM count' if counts else ''}")
    for name, alone in (("decode_sequence", True), ("colocated_sequence", False)):
        if not any((s.finetune_sms == 0) is alone and len(s.ms) > SETTLING_STEPS for s in samples.sequences):
            missing.append(f"{name} of more than {SETTLING_STEPS} steps")
    if missing:
        raise SampleError(f"{_names(samples)}: samples missing for a fit: {missing[0]} (and {len(missing) - 1} more)")


def _choose(errors: Sequence[StageError], models: Sequence[Model]) -> tuple[Model, tuple[StageError, ...]]:
    """The best model by cross-validated mean error, and the errors with the winner marked."""
    best = 0
    for index in range(1, len(errors)):
        if errors[index].cross_validated.mean < (1.0 - _MARGIN) * errors[best].cross_validated.mean:
            best = index
    marked = tuple(
        StageError(e.stage, e.candidate, i == best, e.left_out, e.in_sample, e.cross_validated)
        for i, e in enumerate(errors)
    )
    return models[best], marked


def _fit_solo(samples: Samples, solve: LeastSquares) -> tuple[solo.SoloModel, tuple[StageError, ...]]:
    """Eq. 2: the basis is chosen by leaving out whole batch sizes; leaving out single cells is reported too."""
    points = solo_points(samples)
    groups: tuple[tuple[str, Callable[[solo.SoloPoint], Hashable]], ...] = (
        ("batch", lambda p: p.batch),
        ("batch and context", lambda p: (p.batch, p.kv_tokens)),
    )
    models = [solo.fit_solo(points, basis, solve) for basis in solo.SOLO_BASES]
    by_group: list[list[StageError]] = []
    for left_out, group in groups:
        by_group.append(
            [
                StageError(
                    "solo",
                    model.basis,
                    False,
                    left_out,
                    solo.solo_errors(model, points),
                    solo.solo_left_out(points, model.basis, solve, group),
                )
                for model in models
            ]
        )
    model, chosen = _choose(by_group[0], models)
    others = (
        StageError(e.stage, e.candidate, e.candidate == model.basis, e.left_out, e.in_sample, e.cross_validated)
        for e in by_group[1]
    )
    return model, (*chosen, *others)


def _fit_colocated(
    beside_decode: Sequence[Colocated], device: Device, solve: LeastSquares
) -> tuple[colocated.ColocatedModel, tuple[StageError, ...]]:
    """Eq. 3, given the measured solo times; the form is chosen by leaving out whole splits."""
    points = colocated_points(beside_decode, device.total_sms)
    models = [colocated.fit_colocated(points, form, solve) for form in colocated.COLOCATED_FORMS]
    errors = [
        StageError(
            "colocated",
            model.form,
            False,
            "split",
            colocated.colocated_errors(model, points),
            colocated.colocated_left_out(points, model.form, solve, lambda p: (p.infer_share, p.finetune_share)),
        )
        for model in models
    ]
    return _choose(errors, models)


def _end_to_end(
    samples: Samples,
    beside_decode: Sequence[Colocated],
    device: Device,
    models: tuple[solo.SoloModel, colocated.ColocatedModel],
    solve: LeastSquares,
) -> StageError:
    """Both stages in a row against measured co-runs; left out: a batch size, in both stages."""

    def predict(first: solo.SoloModel, second: colocated.ColocatedModel, sample: Colocated) -> float:
        alone_ms = first.predict_ms(sample.split.decode_sms, sample.batch, sample.batch * sample.context_tokens)
        split, total = sample.split, device.total_sms
        return alone_ms * second.slowdown(split.decode_sms / total, split.finetune_sms / total)

    solo_model, colocated_model = models
    points = solo_points(samples)
    predicted: list[float] = []
    measured: list[float] = []
    for rest, out in left_out_folds(beside_decode, lambda s: s.batch):
        first = solo.fit_solo([p for p in points if p.batch != out[0].batch], solo_model.basis, solve)
        second = colocated.fit_colocated(colocated_points(rest, device.total_sms), colocated_model.form, solve)
        predicted.extend(predict(first, second, s) for s in out)
        measured.extend(median(s.overlapped_ms) for s in out)
    in_sample = summarise(
        [predict(solo_model, colocated_model, s) for s in beside_decode],
        [median(s.overlapped_ms) for s in beside_decode],
    )
    name = f"{solo_model.basis} + {colocated_model.form}"
    return StageError("end to end", name, True, "batch", in_sample, summarise(predicted, measured))


def _fit_finetune(
    samples: Samples, beside_decode: Sequence[Colocated], device: Device, model: str, solve: LeastSquares
) -> tuple[finetune.FinetuneModel, tuple[StageError, ...]]:
    """Unit durations by kind (left out: an SM count) and the factor beside decode by split (left out: a batch size)."""
    units: list[finetune.UnitModel] = []
    errors: list[StageError] = []
    for kind in UNIT_KINDS:
        unit, stages = _fit_unit(samples, kind, model, solve)
        units.append(unit)
        errors.extend(stages)
    factors = [s.unit_pair_ms / _pair_alone_ms(samples, units, s) for s in beside_decode]
    splits = [s.split for s in beside_decode]
    beside = _medians(splits, factors)
    predicted: list[float] = []
    measured: list[float] = []
    for rest, out in left_out_folds(range(len(factors)), lambda index: beside_decode[index].batch):
        known = _medians([splits[index] for index in rest], [factors[index] for index in rest])
        for index in (index for index in out if splits[index] in known):
            predicted.append(known[splits[index]])
            measured.append(factors[index])
    in_sample, left_out = summarise([beside[split] for split in splits], factors), summarise(predicted, measured)
    errors.append(StageError("unit beside decode", "factor by split", True, "batch", in_sample, left_out))
    return finetune.FinetuneModel(tuple(units), tuple(beside[split] for split in device.splits)), tuple(errors)


def _fit_unit(
    samples: Samples, kind: UnitKind, model: str, solve: LeastSquares
) -> tuple[finetune.UnitModel, tuple[StageError, ...]]:
    points = [
        finetune.UnitPoint(s.tokens, s.sms, median(s.ms))
        for s in samples.finetune_units
        if s.unit == kind and s.model == model
    ]
    models = [finetune.fit_unit(kind, points, form, solve) for form in finetune.forms_for(kind, points)]
    errors = [
        StageError(
            f"unit {kind}",
            unit.form,
            False,
            "SM count",
            finetune.unit_errors(unit, points),
            finetune.unit_left_out(kind, points, unit.form, solve),
        )
        for unit in models
    ]
    return _choose(errors, models)


def _pair_alone_ms(samples: Samples, units: Sequence[finetune.UnitModel], sample: Colocated) -> float:
    """What the models say of a pair of units alone on the SMs of ``sample``; far from what was measured that may be none."""
    tokens, sms = sample.finetune_tokens, sample.split.finetune_sms
    found_ms = finetune.pair_ms(units, tokens, sms)
    if found_ms <= 0.0:
        raise SampleError(
            f"{_names(samples)}: finetune_unit of {sample.finetune_model!r}: by those that were measured, a forward and a "
            f"backward unit of {tokens} tokens on {sms} SMs take {found_ms:.3g} ms; measure some on that many SMs"
        )
    return found_ms


def _medians(splits: Sequence[Split], values: Sequence[float]) -> dict[Split, float]:
    """Median of the values of each split."""
    found: dict[Split, list[float]] = {}
    for split, value in zip(splits, values, strict=True):
        found.setdefault(split, []).append(value)
    return {split: median(of_split) for split, of_split in found.items()}
