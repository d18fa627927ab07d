"""Every built-in policy keeps the contract."""

from __future__ import annotations

from typing import Any

import pytest

from harli_cli.policy_contract import PolicyContract
from harli_core.errors import ConfigError
from policies import POLICIES

OPTIONS: dict[str, dict[str, Any]] = {"separate": {"serving_gpus": 1}}


class TestHarli(PolicyContract):
    """`harli`."""

    policy = "harli"


class TestHybrid(PolicyContract):
    """`hybrid`."""

    policy = "hybrid"


class TestSeparate(PolicyContract):
    """`separate`."""

    policy = "separate"
    options = OPTIONS["separate"]


class TestStaticSplit(PolicyContract):
    """`static_split`."""

    policy = "static_split"


class TestInferenceOnly(PolicyContract):
    """`inference_only`."""

    policy = "inference_only"


class TestPauseOnLoad(PolicyContract):
    """`pause_on_load`."""

    policy = "pause_on_load"


def test_every_built_in_policy_is_here() -> None:
    """A policy that is added to the table is added here too."""
    assert {one.policy for one in PolicyContract.__subclasses__() if one.__module__ == __name__} >= set(POLICIES)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_unknown_options_are_refused(name: str, requests_of: Any) -> None:
    """A mistyped option is one line that names policy and option, not an option ignored."""
    contexts = requests_of([0.0], [10], [2]).scenario(gpus=2).contexts
    with pytest.raises(ConfigError, match=f"policy '{name}' .*'tresholt'"):
        contexts.policies(name, {**OPTIONS.get(name, {}), "tresholt": 3})
