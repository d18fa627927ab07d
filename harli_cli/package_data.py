"""Measured samples and fitted profiles that ship with Harli."""

from __future__ import annotations

import json
from importlib.resources import files

from harli_core.errors import ConfigError
from harli_core.hardware import gpu_sheet
from harli_core.model import model_shape
from harli_core.predict.profile import Profile
from harli_core.predict.samples import Samples, parse_samples

DATA = files("harli_cli") / "data"


def shipped_samples(gpu: str, model: str) -> Samples:
    """The operating points and prefill samples of a served model; `ConfigError` for an unknown GPU or model."""
    gpu_sheet(gpu)
    model_shape(model)
    names = (f"operating_points_{model}.jsonl", f"prefill_{model}.jsonl")
    points, prefill = (parse_samples((DATA / name).read_text("utf-8").splitlines(), name) for name in names)
    return points.merged(prefill)


def shipped_profile(gpu: str, model: str, finetune_model: str) -> Profile:
    """The profile fitted to those samples; `ConfigError` for a combination that was not measured."""
    gpu_sheet(gpu)
    for name in (model, finetune_model):
        model_shape(name)
    resource = DATA / f"profile_{gpu}_{model}__{finetune_model}.json"
    if not resource.is_file():
        raise ConfigError(f"no profile ships for {finetune_model!r} finetuned beside {model!r} on {gpu!r}")
    return Profile.from_dict(json.loads(resource.read_text("utf-8")), resource.name)
