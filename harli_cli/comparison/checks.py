"""Conditions on a comparison, such as ``hybrid.finetune_tokens_per_s > harli.finetune_tokens_per_s``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from harli_cli.comparison.measures import NAMES
from harli_core.errors import ConfigError

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
SHAPE = re.compile(r"\s*(?P<left>[^\s<>=!]+)\s*(?P<sign><=|>=|==|!=|<|>)\s*(?P<right>[^\s<>=!]+)\s*")
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,2})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Figure:
    """The mean over seeds of one measure of one policy."""

    policy: str
    measure: str

    def __str__(self) -> str:
        """As it is written in a check."""
        return f"{self.policy}.{self.measure}"


@dataclass(frozen=True, slots=True)
class Check:
    """``left sign right``; either side is a figure or a number, one of them at least a figure."""

    text: str
    left: Figure | float
    sign: str
    right: Figure | float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a check; a side without a value (no step, no finetuning) fails it."""

    check: str
    left: float | None
    right: float | None
    holds: bool


def read_check(text: str, policies: Collection[str]) -> Check:
    """Read one check; raises `ConfigError` unless it is exactly two operands around a sign that all exist."""
    parts = SHAPE.fullmatch(text)
    if parts is None:
        raise ConfigError(
            f"--check {text!r}: expected POLICY.FIGURE, one of {' '.join(OPERATORS)}, then POLICY.FIGURE or a number"
        )
    left, right = (_operand(text, parts[side], policies) for side in ("left", "right"))
    if not isinstance(left, Figure) and not isinstance(right, Figure):
        raise ConfigError(f"--check {text!r}: compares two numbers; expected POLICY.FIGURE on one side at least")
    return Check(text, left, parts["sign"], right)


def _operand(text: str, word: str, policies: Collection[str]) -> Figure | float:
    if NUMBER.fullmatch(word):
        return float(word)
    policy, dot, measure = word.rpartition(".")
    if not dot or policy not in policies:
        raise ConfigError(
            f"--check {text!r}: {word!r} names no policy of this comparison; they are {', '.join(policies)}"
        )
    if measure not in NAMES:
        raise ConfigError(f"--check {text!r}: no figure {measure!r}; figures are {', '.join(NAMES)}")
    return Figure(policy, measure)


def judge(check: Check, means: Mapping[str, Mapping[str, float | None]]) -> Verdict:
    """Hold ``check`` against the means over seeds, by policy and measure."""
    left, right = (
        means[side.policy][side.measure] if isinstance(side, Figure) else side for side in (check.left, check.right)
    )
    holds = left is not None and right is not None and OPERATORS[check.sign](left, right)
    return Verdict(check.text, left, right, holds)
