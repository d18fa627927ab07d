"""A fitted profile: all that the run-time predictor needs to know of one GPU, served model and finetuned model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from harli_core.errors import SampleError
from harli_core.predict.colocated import COLOCATED_FORMS, ColocatedForm, ColocatedModel
from harli_core.predict.finetune import UNIT_FORMS, FinetuneModel, UnitForm, UnitModel
from harli_core.predict.record import Record
from harli_core.predict.regression import ErrorSummary
from harli_core.predict.samples import UNIT_KINDS, SampleSource, sizes_of_graphs
from harli_core.predict.solo import SOLO_BASES, SoloBasis, SoloModel
from harli_core.predict.tail import Tail
from harli_core.types import Capabilities, Split, UnitKind

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class StageError:
    """Relative errors of one candidate of one stage, on the data it was fitted to and on what was left out.

    ``left_out`` names the groups of the cross-validation ("batch": one batch size with all contexts and SM counts).
    """

    stage: str
    candidate: str
    chosen: bool
    left_out: str
    in_sample: ErrorSummary
    cross_validated: ErrorSummary


@dataclass(frozen=True, slots=True)
class Provenance:
    """What the profile was fitted to."""

    driver: int
    torch: str
    sources: tuple[SampleSource, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """One fitted profile; ``splits`` is sorted by decode SMs and orders every per-split tuple.

    ``graph_batches``: see `samples.Device`; predictions are of the graph that a batch runs.
    """

    gpu: str
    total_sms: int
    splits: tuple[Split, ...]
    model: str
    finetune_model: str
    solo: SoloModel
    colocated: ColocatedModel
    finetune: FinetuneModel
    tail: Tail
    errors: tuple[StageError, ...]
    provenance: Provenance
    schema_version: int = SCHEMA_VERSION
    graph_batches: tuple[int, ...] = ()

    @property
    def capabilities(self) -> Capabilities:
        """The splits that a policy may choose from."""
        return Capabilities(self.gpu, self.total_sms, self.splits)

    def slowdown(self, split: Split) -> float:
        """Eq. 3's factor for a split."""
        return self.colocated.slowdown(split.decode_sms / self.total_sms, split.finetune_sms / self.total_sms)

    def to_dict(self) -> dict[str, object]:
        """Plain dicts, lists, texts and numbers; `from_dict` gives an equal profile back, also after JSON."""
        fields = dataclasses.asdict(self)
        if not self.graph_batches:
            del fields["graph_batches"]
        return cast("dict[str, object]", _plain(fields))

    @staticmethod
    def from_dict(value: Mapping[str, object], source: str = "profile") -> Profile:
        """Read a profile strictly: `SampleError` naming ``source`` and field for anything missing, unknown or wrong."""
        record = Record(value, source)
        version = record.integer("schema_version")
        if version != SCHEMA_VERSION:
            raise SampleError(f"{source}: schema_version {version} is not {SCHEMA_VERSION}; fit the profile again")
        profile = Profile(
            gpu=record.text("gpu"),
            total_sms=record.integer("total_sms"),
            splits=tuple(_split(item) for item in record.records("splits")),
            model=record.text("model"),
            finetune_model=record.text("finetune_model"),
            solo=_solo(record.record("solo")),
            colocated=_colocated(record.record("colocated")),
            finetune=_finetune(record.record("finetune")),
            tail=_tail(record.record("tail")),
            errors=tuple(_stage_error(item) for item in record.records("errors")),
            provenance=_provenance(record.record("provenance")),
            schema_version=version,
            graph_batches=sizes_of_graphs(record),
        )
        record.close()
        _check(profile, source)
        return profile


def _check(profile: Profile, source: str) -> None:
    """Raise unless the parts of a profile fit together."""
    if not profile.splits or list(profile.splits) != sorted(set(profile.splits)):
        raise SampleError(f"{source}: field 'splits': expected at least one, each once, sorted by decode_sms")
    if any(split.decode_sms + split.finetune_sms > profile.total_sms for split in profile.splits):
        raise SampleError(f"{source}: field 'splits': a split needs more than total_sms = {profile.total_sms} SMs")
    needed = {profile.total_sms, *(split.decode_sms for split in profile.splits)}
    if set(profile.solo.sms) != needed or len(profile.solo.sms) != len(needed):
        raise SampleError(f"{source}: field 'solo.sms': expected {sorted(needed)}, found {list(profile.solo.sms)}")
    terms = 3 if profile.solo.basis == "paper" else 4 + len(profile.solo.knots)
    rows = profile.solo.coefficients
    if len(rows) != len(needed) or any(len(row) != terms for row in rows):
        raise SampleError(f"{source}: field 'solo.coefficients': expected {len(needed)} lists of {terms} numbers")
    terms = {"paper": 2, "intercept": 3, "saturating": 2}[profile.colocated.form]
    if len(profile.colocated.coefficients) != terms:
        raise SampleError(f"{source}: field 'colocated.coefficients': expected {terms} numbers")
    if sorted(unit.kind for unit in profile.finetune.units) != sorted(UNIT_KINDS):
        raise SampleError(f"{source}: field 'finetune.units': expected each of {', '.join(UNIT_KINDS)} once")
    for unit in profile.finetune.units:
        terms = {"proportional": 2, "affine": 3, "wide": 3, "fixed": 2}[unit.form]
        if len(unit.coefficients) != terms:
            raise SampleError(f"{source}: field 'finetune.units', {unit.kind}: expected {terms} coefficients")
    if len(profile.finetune.beside) != len(profile.splits):
        raise SampleError(f"{source}: field 'finetune.beside': expected one factor a split ({len(profile.splits)})")


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in cast("dict[str, object]", value).items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in cast("tuple[object, ...]", value)]
    return value


def _split(record: Record) -> Split:
    split = Split(record.integer("decode_sms"), record.integer("finetune_sms"))
    record.close()
    return split


def _solo(record: Record) -> SoloModel:
    model = SoloModel(
        basis=cast("SoloBasis", record.choice("basis", SOLO_BASES)),
        knots=record.integers("knots"),
        batch_max=record.integer("batch_max"),
        sms=record.integers("sms"),
        coefficients=record.number_rows("coefficients"),
    )
    record.close()
    return model


def _colocated(record: Record) -> ColocatedModel:
    form = cast("ColocatedForm", record.choice("form", COLOCATED_FORMS))
    model = ColocatedModel(form, record.numbers("coefficients"))
    record.close()
    return model


def _unit(record: Record) -> UnitModel:
    model = UnitModel(
        kind=cast("UnitKind", record.choice("kind", UNIT_KINDS)),
        form=cast("UnitForm", record.choice("form", UNIT_FORMS)),
        coefficients=record.numbers("coefficients"),
    )
    record.close()
    return model


def _finetune(record: Record) -> FinetuneModel:
    model = FinetuneModel(tuple(_unit(item) for item in record.records("units")), record.positives("beside"))
    record.close()
    return model


def _tail(record: Record) -> Tail:
    tail = Tail(record.positives("solo"), record.positives("colocated"), record.positives("colocated_spread"))
    record.close()
    return tail


def _error_summary(record: Record) -> ErrorSummary:
    summary = ErrorSummary(record.integer("count"), record.number("mean"), record.number("p99"), record.number("max"))
    record.close()
    return summary


def _stage_error(record: Record) -> StageError:
    error = StageError(
        stage=record.text("stage"),
        candidate=record.text("candidate"),
        chosen=record.flag("chosen"),
        left_out=record.text("left_out"),
        in_sample=_error_summary(record.record("in_sample")),
        cross_validated=_error_summary(record.record("cross_validated")),
    )
    record.close()
    return error


def _source(record: Record) -> SampleSource:
    source = SampleSource(record.text("name"), record.integer("lines"), record.text("sha256"))
    record.close()
    return source


def _provenance(record: Record) -> Provenance:
    provenance = Provenance(
        driver=record.integer("driver"),
        torch=record.text("torch"),
        sources=tuple(_source(item) for item in record.records("sources")),
    )
    record.close()
    return provenance
