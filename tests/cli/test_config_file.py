"""`--config`: a TOML file below the options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harli_cli.settings import COMMAND_LINE_ONLY
from harli_core.config import RunConfig
from tests.cli.conftest import Harli

BAD_FILES = {
    "gpu_count = 2": ("unknown key 'gpu_count'", "gpus", "qos_ms"),
    "qos = 30": ("unknown key 'qos', did you mean qos_ms?", "known keys are trace,"),
    "out = 'results'": ("'out' is for the command line only",),
    "no_prefill = true": ("'no_prefill' is for the command line only", "prefill_gpus = 0"),
    "policy_option = 'margin=0.1'": ("for the command line only", "[policy_options]"),
    "gpus = 'two'": ("gpus = 'two'", "integer"),
    "gpus = 2.5": ("gpus = 2.5", "integer"),
    "gpus = true": ("gpus = True", "integer"),
    "qos_ms = '40'": ("qos_ms = '40'", "number"),
    "qos_ms = nan": ("qos_ms = nan", "finite"),
    "trace = 3": ("trace = 3", "string"),
    "policy_options = 3": ("policy_options = 3", "dictionary"),
    "policy_options.margin = [1]": ("policy_options.margin = [1]",),
    "just words": ("not a TOML file", "line 1"),
    "gpus = 2\ngpus = 3": ("not a TOML file",),
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_bad_file(harli: Harli, trace: Path, tmp_path: Path, text: str) -> None:
    """The line names the file and the key; nothing is written."""
    (tmp_path / "run.toml").write_text(text)
    message = harli("run", "--trace", trace, "--config", "run.toml").error()
    for part in ("run.toml", *BAD_FILES[text]):
        assert part in message
    assert not (tmp_path / "out").exists()


def test_not_text(harli: Harli, trace: Path, tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are no TOML."""
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    assert "run.toml: not a TOML file" in harli("run", "--trace", trace, "--config", "run.toml").error()


def test_option_beats_file_beats_default(harli: Harli, trace: Path, tmp_path: Path) -> None:
    """Each value comes from the nearest place that gives it; policy options are merged one by one."""
    (tmp_path / "run.toml").write_text(
        f"trace = '{trace}'\ngpus = 3\nqos_ms = 50\nrouter = 'least_kv'\n[policy_options]\nmargin = 0.1\nhold_steps = 8\n"
    )
    answer = harli(
        "run", "--config", "run.toml", "--gpus", 4, "--policy-option", "margin=0.2", "--router", "round_robin", "--json"
    )
    assert answer.code == 0
    found = json.loads(answer.out)["config"]
    assert (found["trace"], found["gpus"], found["qos_ms"], found["seed"]) == (str(trace), 4, 50.0, 0)
    assert found["router"] == "round_robin"
    assert found["policy_options"] == {"margin": 0.2, "hold_steps": 8}


def test_fit_of_file_and_options_together(harli: Harli, trace: Path, tmp_path: Path) -> None:
    """What fits in neither alone is judged after both are read."""
    (tmp_path / "run.toml").write_text("serving_gpus = 3\ngpus = 3\n")
    message = harli("run", "--trace", trace, "--config", "run.toml", "--gpus", 2).error()
    assert "serving_gpus = 3 is more than gpus = 2" in message


def test_every_key_has_an_option(harli: Harli) -> None:
    """Whatever a file can set, the command line can set too."""
    text = harli("run", "--help").out
    for key in RunConfig.model_fields:
        assert (
            f"--{key.replace('_', '-').removesuffix('s') if key == 'policy_options' else key.replace('_', '-')}" in text
        )


def test_every_option_is_a_key_or_for_the_command_line_only(harli: Harli) -> None:
    """The list of options that are no keys is complete, and has nothing that is a key."""
    lines = harli("run", "--help").out.splitlines()
    options = {line.split()[0].strip("-,").replace("-", "_") for line in lines if line.lstrip().startswith("--")}
    assert options - {"help"} == {*RunConfig.model_fields, *COMMAND_LINE_ONLY} - {"policy_options"}
