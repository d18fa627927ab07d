"""One line of a JSON-lines trace as a strictly read record, and what each format makes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Never

from traces.cells import LARGEST_HASH
from traces.content import quoted
from traces.digits import MAX_DIGITS, MAX_SECONDS

_LARGEST_TOKENS = 10**MAX_DIGITS - 1
_REAL = re.compile(r"[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,3})?")


class RecordFaultError(Exception):
    """What is wrong with a record: the key (or `None`) and the words."""

    def __init__(self, key: str | None, what: str) -> None:
        """Keep both."""
        super().__init__(what)
        self.key, self.what = key, what


class Real(str):
    """A JSON number that is not a plain whole one, as it is written."""

    __slots__ = ()


@dataclass(slots=True)
class Request:
    """One request of a record; ``arrival`` in the units of its format, ``derived`` where the record does not tell it."""

    arrival: int | float
    prompt_tokens: int
    output_tokens: int
    session: str | None = None
    request_class: str | None = None
    prefix_hashes: list[int] | None = None
    derived: bool = False


Record = Mapping[str, Any]
Reader = Callable[[Record, dict[str, Any]], list[Request]]
"""Requests of one record; the dict is the reader's own, for what one line must know of those before."""


def read_record(line: bytes) -> dict[str, Any]:
    """Read one line as a JSON object whose keys differ; raises `RecordFaultError`."""
    if b"\r" in line:
        raise RecordFaultError(None, f"{quoted(line)} holds a carriage return; expected lines that end in LF or CRLF")
    try:
        text = line.decode("utf-8")
        found = json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant, parse_float=Real)
    except UnicodeDecodeError:
        raise RecordFaultError(
            None, f"{quoted(line)} holds bytes that are not UTF-8 text; expected a JSON object"
        ) from None
    except RecursionError:
        raise RecordFaultError(None, f"{quoted(line)} is nested too deeply; expected a flat JSON object") from None
    except json.JSONDecodeError as error:
        what = f"{quoted(line)} is not JSON ({error.msg} at character {error.pos + 1}); expected a JSON object"
        raise RecordFaultError(None, what) from None
    except ValueError:
        raise RecordFaultError(
            None, f"{quoted(line)} holds a number with too many digits; expected a JSON object"
        ) from None
    if not isinstance(found, dict):
        raise RecordFaultError(None, f"{quoted(line)} is no JSON object; expected one a line")
    return found


def tokens(record: Record, key: str) -> int:
    """A number of tokens of 1 or more."""
    right = f"expected a whole number from 1 to {_LARGEST_TOKENS}"
    value = _present(record, key, right)
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise RecordFaultError(key, f"'{value}' is not positive; {right}")
        if value > _LARGEST_TOKENS:
            raise RecordFaultError(key, f"{quoted(str(value))} is too large; {right}")
        return value
    what = "is not a whole number in plain digits" if isinstance(value, Real) else "is not a number"
    raise RecordFaultError(key, f"{_shown(value)} {what}; {right}")


def whole_time(record: Record, key: str, per_s: int) -> int:
    """A time in whole units."""
    largest = min(int(MAX_SECONDS) * per_s, 1 << 62) - 1
    right = f"expected a whole number from 0 to {largest}"
    value = _present(record, key, right)
    if not isinstance(value, int) or isinstance(value, bool):
        what = "is not a whole number in plain digits" if isinstance(value, Real) else "is not a number"
        raise RecordFaultError(key, f"{_shown(value)} {what}; {right}")
    if not 0 <= value <= largest:
        raise RecordFaultError(key, f"{quoted(str(value))} is {'negative' if value < 0 else 'too large'}; {right}")
    return value


def real_time(record: Record, key: str, per_s: int) -> float:
    """A time in units, whole or not."""
    right = f"expected a number from 0 to under {MAX_SECONDS * per_s:.0e}"
    value = _present(record, key, right)
    if isinstance(value, bool) or not isinstance(value, int | Real):
        raise RecordFaultError(key, f"{_shown(value)} is not a number; {right}")
    written = str(value)
    if written.startswith("-"):
        raise RecordFaultError(key, f"{quoted(written)} is negative; {right}")
    if len(written) > 48 or not _REAL.fullmatch(written) or float(written) >= MAX_SECONDS * per_s:
        raise RecordFaultError(key, f"{quoted(written)} is too large; {right}")
    return float(written)


def label(record: Record, key: str) -> str | None:
    """A name or a number that serves as one; `None` where it is absent or null."""
    value = record.get(key)
    if value is None:
        return None
    if isinstance(value, Real | bool) or not isinstance(value, str | int) or len(str(value)) > 1024:
        raise RecordFaultError(key, f"{_shown(value)} is no name; expected a short text or a whole number")
    name = str(value)
    if not name.isascii():
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            raise RecordFaultError(key, f"{quoted(name)} holds half a character; expected text") from None
    return name


def prefix_hashes(record: Record, key: str = "hash_ids") -> list[int] | None:
    """The hashes of the prompt's blocks; `None` where the key is absent or null."""
    value = record.get(key)
    if value is None:
        return None
    right = f"expected a list of whole numbers from 0 to {LARGEST_HASH}"
    if not isinstance(value, list):
        raise RecordFaultError(key, f"{_shown(value)} is no list; {right}")
    for one in value:
        if type(one) is not int or not 0 <= one <= LARGEST_HASH:
            raise RecordFaultError(key, f"{_shown(one)} is no hash; {right}")
    return value


def check_keys(record: Record, known: frozenset[str]) -> None:
    """Raise `RecordFaultError` for a key that the format does not have."""
    for key in record:
        if key not in known:
            raise RecordFaultError(
                None, f"{quoted(key)} is no key of this format; known keys: {', '.join(sorted(known))}"
            )


def _present(record: Record, key: str, right: str) -> Any:
    if key not in record:
        raise RecordFaultError(key, f"is missing; {right}")
    return record[key]


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return quoted(str(value))
    try:
        return quoted(json.dumps(value))
    except (ValueError, RecursionError):
        return "a value"


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise RecordFaultError(None, f"the key {quoted(twice)} stands twice in one object; expected it once")
    return found


def _constant(name: str) -> Never:
    raise RecordFaultError(None, f"'{name}' is not a finite number; expected a JSON number")
