"""Options of a policy: read from the command line, and held against what its class takes."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from harli_core.errors import ConfigError
from policies import PolicyFactory


def read_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """``name=value``, the value as TOML reads it where it can (numbers, true, false), else as text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--policy-option {pair!r}: expected NAME=VALUE, as in threshold=16")
        try:
            read = tomllib.loads(f"value = {value}")
        except tomllib.TOMLDecodeError:
            read = {}
        found[name] = read["value"] if read.keys() == {"value"} else value
    return found


def check_options(policy: str, factory: PolicyFactory, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless ``factory`` can be called as ``factory(context, **options)``."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # some callables written in C do not tell
    taken = list(signature.parameters.values())[1:]  # the first one is the context
    known = sorted(one.name for one in taken if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))
    if not any(one.kind is one.VAR_KEYWORD for one in taken):
        for option in options:
            if option not in known:
                raise ConfigError(f"policy {policy!r} has no option {option!r}; it has {', '.join(known) or 'none'}")
    try:
        signature.bind(None, **options)
    except TypeError as error:
        raise ConfigError(
            f"policy {policy!r} cannot be made from a context and the options {dict(options)}: {error}"
        ) from None
