"""Strict reading of JSON objects: every field is asked for once, in its range, and none is left over."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

from harli_core.errors import SampleError

MOST = 2**63 - 1
"""The largest whole number of a field: beyond, arithmetic with floats may fail."""


class Record:
    """One JSON object at a place (``where``) that every error names; all errors are `SampleError`."""

    def __init__(self, value: object, where: str) -> None:
        """Take ``value``, which has to be an object with text keys."""
        if not isinstance(value, Mapping):
            raise SampleError(f"{where}: expected an object, found {_shown(value)}")
        fields = cast("Mapping[object, object]", value)
        if not all(isinstance(key, str) for key in fields):
            raise SampleError(f"{where}: expected text keys, found {_shown(fields)}")
        self.where = where
        self._fields = cast("Mapping[str, object]", fields)
        self._unread = set(self._fields)

    def _take(self, key: str) -> object:
        if key not in self._fields:
            raise SampleError(f"{self.where}: field {key!r} is missing")
        self._unread.discard(key)
        return self._fields[key]

    def wrong(self, key: str, expected: str) -> SampleError:
        """The error for a field that is not what it should be."""
        return SampleError(f"{self.where}: field {key!r}: expected {expected}, found {_shown(self._fields.get(key))}")

    def has(self, key: str) -> bool:
        """Whether a field that may be left out is there."""
        return key in self._fields

    def text(self, key: str) -> str:
        """A text that is not empty."""
        value = self._take(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a text")
        return value

    def choice(self, key: str, options: Sequence[str]) -> str:
        """One of ``options``."""
        value = self._take(key)
        if not isinstance(value, str) or value not in options:
            raise self.wrong(key, "one of " + ", ".join(options))
        return value

    def flag(self, key: str) -> bool:
        """`True` or `False`."""
        value = self._take(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def integer(self, key: str, minimum: int = 1) -> int:
        """A whole number of at least ``minimum``."""
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.wrong(key, f"a whole number >= {minimum}")
        if value > MOST:
            raise self.wrong(key, f"a whole number <= {MOST}")
        return value

    def integers(self, key: str, minimum: int = 1) -> tuple[int, ...]:
        """A list of whole numbers of at least ``minimum``; it may be empty."""
        values = self._list(key)
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= minimum for v in values):
            raise self.wrong(key, f"a list of whole numbers >= {minimum}")
        if any(cast("int", v) > MOST for v in values):
            raise self.wrong(key, f"a list of whole numbers <= {MOST}")
        return cast("tuple[int, ...]", tuple(values))

    def integer_pairs(self, key: str) -> tuple[tuple[int, int], ...]:
        """A list of lists of two whole numbers above 0."""
        pairs: list[tuple[int, int]] = []
        for value in self._list(key):
            pair = cast("list[object]", value) if isinstance(value, list) else []
            if len(pair) != 2 or not all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in pair):
                raise self.wrong(key, "a list of pairs of whole numbers > 0")
            pairs.append(cast("tuple[int, int]", tuple(pair)))
        return tuple(pairs)

    def number(self, key: str) -> float:
        """A finite number."""
        value = self._take(key)
        if not _finite(value):
            raise self.wrong(key, "a finite number")
        return float(cast("float", value))

    def positive(self, key: str) -> float:
        """A finite number above 0."""
        value = self.number(key)
        if value <= 0.0:
            raise self.wrong(key, "a number > 0")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers; it may be empty."""
        values = self._list(key)
        if not all(_finite(v) for v in values):
            raise self.wrong(key, "a list of finite numbers")
        return tuple(float(cast("float", v)) for v in values)

    def positives(self, key: str) -> tuple[float, ...]:
        """A list, not empty, of finite numbers above 0."""
        values = self.numbers(key)
        if not values or min(values) <= 0.0:
            raise self.wrong(key, "a list, not empty, of numbers > 0")
        return values

    def number_rows(self, key: str) -> tuple[tuple[float, ...], ...]:
        """A list of lists of finite numbers."""
        rows: list[tuple[float, ...]] = []
        for value in self._list(key):
            row = cast("list[object]", value) if isinstance(value, list) else [None]
            if not all(_finite(v) for v in row):
                raise self.wrong(key, "a list of lists of finite numbers")
            rows.append(tuple(float(cast("float", v)) for v in row))
        return tuple(rows)

    def record(self, key: str) -> Record:
        """An object."""
        return Record(self._take(key), f"{self.where}, {key}")

    def records(self, key: str) -> tuple[Record, ...]:
        """A list of objects."""
        return tuple(Record(v, f"{self.where}, {key}[{i}]") for i, v in enumerate(self._list(key)))

    def close(self) -> None:
        """Refuse fields that nobody asked for."""
        if self._unread:
            raise SampleError(f"{self.where}: unknown field {min(self._unread)!r}")

    def _list(self, key: str) -> list[object]:
        value = self._take(key)
        if not isinstance(value, list):
            raise self.wrong(key, "a list")
        return cast("list[object]", value)


def _finite(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        return False


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
