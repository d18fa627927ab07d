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
    signature = _signature(factory)
    if signature is None:
        return
    known, takes_any = _options_taken(signature)
    if not takes_any:
        for option in options:
            if option not in known:
                raise ConfigError(f"policy {policy!r} has no option {option!r}; it has {', '.join(known) or 'none'}")
    try:
        signature.bind(None, **options)
    except TypeError as error:
        raise ConfigError(
            f"policy {policy!r} cannot be made from a context and the options {dict(options)}: {error}"
        ) from None


def options_of_each(policies: Mapping[str, PolicyFactory], options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Deal ``options`` out to several policies: ``POLICY.NAME`` is for that one, ``NAME`` for all that take it.

    Raises `ConfigError` for an option that no policy gets.
    """
    dealt: dict[str, dict[str, Any]] = {policy: {} for policy in policies}
    for full_name in sorted(options, key=lambda name: "." in name):  # what is for one beats what is for all
        policy, dot, name = full_name.rpartition(".")
        if dot and policy not in policies:
            raise ConfigError(
                f"policy option {full_name!r}: {policy!r} is no policy of this comparison; they are {', '.join(policies)}"
            )
        getting = [policy] if dot else [one for one, factory in policies.items() if _takes(factory, name)]
        if not getting:
            raise ConfigError(f"policy option {name!r}: none of {', '.join(policies)} has it")
        for one in getting:
            dealt[one][name] = options[full_name]
    return dealt


def _takes(factory: PolicyFactory, option: str) -> bool:
    signature = _signature(factory)
    if signature is None:
        return False
    known, takes_any = _options_taken(signature)
    return takes_any or option in known


def _signature(factory: PolicyFactory) -> inspect.Signature | None:
    """`None` for some callables written in C, which do not tell."""
    try:
        return inspect.signature(factory)
    except (TypeError, ValueError):
        return None


def _options_taken(signature: inspect.Signature) -> tuple[list[str], bool]:
    """Names of the options, sorted, and whether any other is taken too."""
    taken = list(signature.parameters.values())[1:]  # the first one is the context
    known = sorted(one.name for one in taken if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))
    return known, any(one.kind is one.VAR_KEYWORD for one in taken)
