"""How a policy is found: by name, or as ``module:Class``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harli_core.errors import ConfigError
from policies import POLICIES, find_policy
from policies.harli import Harli


def test_built_in_names() -> None:
    """The six policies that ship, each under its own name."""
    assert sorted(POLICIES) == ["harli", "hybrid", "inference_only", "pause_on_load", "separate", "static_split"]
    assert find_policy("harli") is Harli
    assert all(callable(find_policy(name)) for name in POLICIES)


def test_a_policy_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``module:Class`` is imported from wherever Python looks."""
    (tmp_path / "my_policies.py").write_text("class Mine:\n    pass\n\nNOT_A_CLASS = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_policy("my_policies:Mine").__name__ == "Mine"
    with pytest.raises(ConfigError, match="module 'my_policies' has no class 'Yours'"):
        find_policy("my_policies:Yours")
    with pytest.raises(ConfigError, match="has no class 'NOT_A_CLASS'"):
        find_policy("my_policies:NOT_A_CLASS")


def test_an_unknown_name_lists_the_known_ones() -> None:
    """What is known, and what else may be given."""
    known = "harli, hybrid, inference_only, pause_on_load, separate, static_split"
    with pytest.raises(ConfigError, match=re.escape(f"unknown policy 'harly': known are {known}, or give your own as")):
        find_policy("harly")


@pytest.mark.parametrize("name", ["no_such_module_here:Mine", "policies.absent:Mine"])
def test_a_module_that_cannot_be_imported(name: str) -> None:
    """The module is named, and why."""
    module = name.partition(":")[0]
    with pytest.raises(ConfigError, match=f"policy '{name}': cannot import '{module}'"):
        find_policy(name)


@pytest.mark.parametrize("name", [":Mine", "policies.harli:", ".harli:Harli", ":"])
def test_half_a_name_is_refused(name: str) -> None:
    """An empty module or class is an error of the option, not of Python."""
    with pytest.raises(ConfigError, match=f"policy '{name}'"):
        find_policy(name)


def test_a_module_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the user's module names the policy and the fault."""
    (tmp_path / "broken_policy.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="policy 'broken_policy:Mine': cannot import 'broken_policy'"):
        find_policy("broken_policy:Mine")
