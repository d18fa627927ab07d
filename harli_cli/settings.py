"""From defaults, a configuration file and the command line to one `RunConfig`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harli_cli.policy_options import read_pairs
from harli_core.config import RunConfig, check_fields, run_config
from harli_core.errors import ConfigError

COMMAND_LINE_ONLY = (
    "backend",
    "baselines",
    "config",
    "device",
    "finetune_job",
    "html",
    "json",
    "load_format",
    "log",
    "model_path",
    "no_prefill",
    "out",
    "perfetto",
    "policy_option",
    "prefill",
)
"""Options of ``harli run`` that are no keys of a configuration file."""


def merged(path: Path | None, options: Mapping[str, Any], policy_options: Sequence[str]) -> RunConfig:
    """Defaults, then the file, then the command line (`None`: not given there)."""
    values = _read_toml(path) if path is not None else {}
    source = "options" if path is None else f"{path} and options"
    if path is not None:
        _check_keys(values, path)
        check_fields(values, str(path))
    values.update({name: value for name, value in options.items() if value is not None})
    if policy_options:
        values["policy_options"] = {**values.get("policy_options", {}), **read_pairs(policy_options)}
    return run_config(values, source)


def check_serving_gpus(config: RunConfig, baselines: bool) -> None:
    """Raise `ConfigError` for a ``serving_gpus`` that nothing in this run would look at."""
    if config.serving_gpus is not None and config.policy != "separate" and not baselines:
        raise ConfigError(
            f"serving_gpus = {config.serving_gpus} is used only by the policy 'separate', not by {config.policy!r}; "
            "leave it out, or compare with --baselines"
        )
    other = config.policy_options.get("serving_gpus")
    if config.policy == "separate" and None not in (config.serving_gpus, other) and config.serving_gpus != other:
        raise ConfigError(
            f"serving_gpus = {config.serving_gpus} and policy option serving_gpus = {other}; give one of them"
        )


def _check_keys(values: Mapping[str, Any], path: Path) -> None:
    for key in values:
        if key in COMMAND_LINE_ONLY:
            instead = {"no_prefill": "; write prefill_gpus = 0", "policy_option": "; write a table [policy_options]"}
            raise ConfigError(f"{path}: {key!r} is for the command line only{instead.get(key, '')}")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file ({error})") from None
