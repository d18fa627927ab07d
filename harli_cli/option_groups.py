"""Options that several commands share: a dataclass is a group of them, and a command takes the group as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer in which each parameter that is a dataclass is replaced by its fields, in their place.

    A field is annotated as typer wants it of a parameter, and has a default. The parameters of a command and the fields
    of its groups have different names.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if not is_dataclass(kind):
            parameters.append(parameter.replace(annotation=kind))
            continue
        assert isinstance(kind, type)
        groups[parameter.name] = kind
        options = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            one = inspect.Parameter(
                field.name, parameter.KEYWORD_ONLY, default=field.default, annotation=options[field.name]
            )
            parameters.append(one)

    @wraps(command)
    def grouped(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)}) for name, kind in groups.items()
        }
        command(**made, **given)

    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    grouped.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    grouped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return grouped
