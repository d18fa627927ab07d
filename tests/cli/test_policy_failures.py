"""Policies of a user's own that fail: exit code 4, one line, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Answer, Harli

POLICY = """
from policies.inference_only import InferenceOnly


class Mine(InferenceOnly):
    def __init__(self, context, patience=3, *, zeal=1.0):
        super().__init__(context)
        {constructor}

    def plan(self, view):
        {plan}
        return super().plan(view)

    def observe(self, result):
        {observe}
"""


def run(harli: Harli, trace: Path, tmp_path: Path, module: str, *options: str, **lines: str) -> Answer:
    """Run the policy with ``lines`` put into its methods; every module needs a name of its own."""
    parts = {"constructor": "pass", "plan": "pass", "observe": "pass", **lines}
    (tmp_path / f"{module}.py").write_text(POLICY.format(**parts))
    return harli("run", "--trace", trace, "--log", "log.jsonl", "--policy", f"{module}:Mine", *options)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("constructor", "policy 'bad_constructor:Mine' failed in its constructor for instance 0: "),
        ("plan", "policy Mine failed in plan() at instance 0, step 0 (batch 0): "),
        ("observe", "policy Mine failed in observe() at instance 0, step 0 (batch 0): "),
    ],
)
def test_one_line_and_nothing_written(harli: Harli, trace: Path, tmp_path: Path, method: str, said: str) -> None:
    """The line names the method, the exception and the place in the user's file."""
    answer = run(harli, trace, tmp_path, f"bad_{method}", **{method: "raise LookupError('no such luck')"})
    assert (answer.code, answer.out) == (4, "")
    assert answer.err.startswith(f"harli: {said}LookupError: no such luck (bad_{method}.py, line ")
    assert answer.err.count("\n") == 1
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {trace.name, f"bad_{method}.py"}


def test_no_plan(harli: Harli, trace: Path, tmp_path: Path) -> None:
    """An answer that is no plan."""
    answer = run(harli, trace, tmp_path, "no_plan", plan="return {}")
    assert answer.code == 4
    assert "it returned dict, expected a StepPlan" in answer.err


def test_a_factory_that_fails(harli: Harli, trace: Path) -> None:
    """A callable that is no policy class and raises is reported the same way."""
    answer = harli("run", "--trace", trace, "--policy", "json:loads")
    assert answer.code == 4
    assert "policy 'json:loads' failed in its constructor for instance 0: TypeError: the JSON object" in answer.err


def test_unknown_option_of_a_users_policy(harli: Harli, trace: Path, tmp_path: Path) -> None:
    """Its options are read off its constructor."""
    answer = run(harli, trace, tmp_path, "options_read", "--policy-option", "paitence=4")
    assert "policy 'options_read:Mine' has no option 'paitence'; it has patience, zeal" in answer.error()


def test_known_options_of_a_users_policy(harli: Harli, trace: Path, tmp_path: Path) -> None:
    """Both kinds of parameters are options."""
    options = ("--policy-option", "patience=4", "--policy-option", "zeal=2.0")
    assert run(harli, trace, tmp_path, "options_taken", *options).code == 0


def test_module_that_raises(harli: Harli, trace: Path, tmp_path: Path) -> None:
    """A module that cannot be imported for whatever reason is bad input."""
    (tmp_path / "broken_module.py").write_text("undefined_name\n")
    message = harli("run", "--trace", trace, "--policy", "broken_module:Mine").error()
    assert "cannot import 'broken_module' (NameError: name 'undefined_name' is not defined)" in message
