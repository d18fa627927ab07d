"""The one shape that every trace takes, whatever file or generator it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harli_core.errors import TraceError
from traces.labels import Labels, PrefixHashes


@dataclass(frozen=True, slots=True, eq=False)
class RequestTrace:  # noqa: PLW1641  (arrays do not hash)
    """Requests in order of arrival, one array a column; build it with `RequestTrace.of`, which checks them.

    ``arrival_s`` (float64): seconds from the first request, so the first is 0; never falls, equal ones are allowed.
    ``prompt_tokens``, ``output_tokens`` (int64): 1 or more. ``source`` says in reports where the trace came from.
    ``session``, ``request_class``, ``prefix_hashes``: what some formats also say; `None` where the file does not.
    The arrays are read-only. Two traces are equal when all columns are; ``source`` does not count.
    """

    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    source: str
    session: Labels | None = None
    request_class: Labels | None = None
    prefix_hashes: PrefixHashes | None = None

    @classmethod
    def of(
        cls,
        arrival_s: ArrayLike,
        prompt_tokens: ArrayLike,
        output_tokens: ArrayLike,
        *,
        source: str,
        session: Labels | None = None,
        request_class: Labels | None = None,
        prefix_hashes: PrefixHashes | None = None,
    ) -> Self:
        """Copy the columns and check them; raises `TraceError` naming the source, the request (from 0), the column."""
        arrivals = np.array(arrival_s, dtype=np.float64)
        prompts = _whole("prompt_tokens", prompt_tokens, source)
        outputs = _whole("output_tokens", output_tokens, source)
        for name, column in (("arrival_s", arrivals), ("prompt_tokens", prompts), ("output_tokens", outputs)):
            if column.ndim != 1 or column.size != arrivals.size:
                raise TraceError(f"{source}: {name} has shape {column.shape}; expected one value for each request")
        if not arrivals.size:
            raise TraceError(f"{source}: no requests; expected at least one")
        _require(np.isfinite(arrivals), "arrival_s", arrivals, "a finite number", source)
        if arrivals[0] != 0:
            raise TraceError(
                f"{source}: request 0, arrival_s: {arrivals[0]} is not 0; seconds count from the first request"
            )
        in_order = np.concatenate(([True], arrivals[1:] >= arrivals[:-1]))
        _require(in_order, "arrival_s", arrivals, "no earlier than the request before", source)
        _require(prompts >= 1, "prompt_tokens", prompts, "1 or more", source)
        _require(outputs >= 1, "output_tokens", outputs, "1 or more", source)
        for column in (arrivals, prompts, outputs):
            column.setflags(write=False)
        for name, count in (
            ("session", None if session is None else session.codes.size),
            ("request_class", None if request_class is None else request_class.codes.size),
            ("prefix_hashes", None if prefix_hashes is None else prefix_hashes.offsets.size - 1),
        ):
            if count is not None and count != arrivals.size:
                raise TraceError(f"{source}: {name} has {count} entries; expected one for each request")
        return cls(arrivals, prompts, outputs, source, session, request_class, prefix_hashes)

    def chosen(self, index: NDArray[np.int64], arrival_s: NDArray[np.float64], source: str | None = None) -> Self:
        """Build the trace of chosen requests under new arrivals, checked as by `of`."""
        return self.of(
            arrival_s,
            self.prompt_tokens[index],
            self.output_tokens[index],
            source=self.source if source is None else source,
            session=None if self.session is None else self.session.take(index),
            request_class=None if self.request_class is None else self.request_class.take(index),
            prefix_hashes=None if self.prefix_hashes is None else self.prefix_hashes.take(index),
        )

    def __len__(self) -> int:
        """Count the requests."""
        return int(self.arrival_s.size)

    def __eq__(self, other: object) -> bool:
        """Compare all columns, value for value."""
        if not isinstance(other, RequestTrace):
            return NotImplemented
        return (
            np.array_equal(self.arrival_s, other.arrival_s)
            and np.array_equal(self.prompt_tokens, other.prompt_tokens)
            and np.array_equal(self.output_tokens, other.output_tokens)
            and _same(self.session, other.session)
            and _same(self.request_class, other.request_class)
            and _same(self.prefix_hashes, other.prefix_hashes)
        )

    @property
    def span_s(self) -> float:
        """Seconds from the first to the last arrival."""
        return float(self.arrival_s[-1])

    def summary(self) -> dict[str, str | int | float | None]:
        """Say in a few plain numbers what the trace asks for; ``mean_rps`` is `None` where the span is 0."""
        return {
            "source": self.source,
            "requests": len(self),
            "span_s": self.span_s,
            "mean_rps": (len(self) - 1) / self.span_s if self.span_s > 0 else None,
            "prompt_tokens": int(self.prompt_tokens.sum()),
            "output_tokens": int(self.output_tokens.sum()),
            "mean_prompt_tokens": float(self.prompt_tokens.mean()),
            "mean_output_tokens": float(self.output_tokens.mean()),
            "max_prompt_tokens": int(self.prompt_tokens.max()),
            "max_output_tokens": int(self.output_tokens.max()),
        }


@dataclass(frozen=True, slots=True)
class RepairOptions:
    """Which repairs the user asked for; without them every fault is an error.

    ``sort``: put arrivals in order. ``drop_failed``: leave out requests that the file itself marks as failed.
    ``drop_invalid``: leave out rows that cannot be read. ``clip_prompt``: cut longer prompts to this many tokens.
    """

    sort: bool = False
    drop_failed: bool = False
    drop_invalid: bool = False
    clip_prompt: int | None = None


@dataclass(frozen=True, slots=True)
class Repairs:
    """What was changed because the user asked for it; all zero where the trace is as the file has it.

    ``sorted_rows``: rows that stood below a row with a later arrival and were moved up. ``dropped_failed``,
    ``dropped_invalid``: rows left out. ``clipped_prompts``: requests whose prompt was cut. ``derived_arrivals`` is
    counted unasked: requests of a chain whose arrival is not in the file, since it depends on how fast the ones
    before are served; they arrive when the one before has, plus the waiting time that the file gives.
    """

    sorted_rows: int = 0
    dropped_failed: int = 0
    dropped_invalid: int = 0
    clipped_prompts: int = 0
    derived_arrivals: int = 0


@dataclass(frozen=True, slots=True)
class LoadedTrace:
    """A trace, the name of the format that it was read as, the repairs made on the way, and why that format."""

    trace: RequestTrace
    format: str
    repairs: Repairs
    reason: str = ""


def _same(one: Labels | PrefixHashes | None, other: Labels | PrefixHashes | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.same(other)  # type: ignore[arg-type]  # both come from the same field


def _whole(name: str, values: ArrayLike, source: str) -> NDArray[np.int64]:
    column: NDArray[Any] = np.asarray(values)
    if column.size and column.dtype.kind not in "iu":
        raise TraceError(f"{source}: {name} holds {column.dtype} values; expected whole numbers")
    return np.array(column, dtype=np.int64)


def _require(ok: NDArray[np.bool_], name: str, column: NDArray[Any], right: str, source: str) -> None:
    if not ok.all():
        request = int(np.argmin(ok))
        raise TraceError(f"{source}: request {request}, {name}: {column[request]} is wrong; expected {right}")
