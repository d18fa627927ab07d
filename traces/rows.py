"""The rows of a file as a format's parser reads them, and how they become a trace: checked, repaired where asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harli_core.errors import TraceError
from traces.content import TraceContent, quoted
from traces.labels import Labels, PrefixHashes
from traces.schema import RepairOptions, Repairs, RequestTrace


@dataclass(frozen=True, slots=True, eq=False)
class RawRows:
    """Every request of a file, faulty ones included, in the file's order.

    ``rows``: the line of each (the header is 1). ``arrivals``: whole units or float units of ``1 / per_s`` seconds;
    `None` where the format has none. ``readable``: no fault in the row. ``failed``: readable but for being marked as
    failed. ``derived``: arrivals that are not in the file. ``fault(i)`` words what is wrong with an unreadable or
    failed row: field and text. ``arrival_text(i)`` is the arrival as the file has it.
    """

    rows: NDArray[np.int64]
    arrivals: NDArray[Any] | None
    per_s: int
    arrival_name: str
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    readable: NDArray[np.bool_]
    failed: NDArray[np.bool_]
    fault: Callable[[int], tuple[str | None, str]]
    arrival_text: Callable[[int], bytes | str]
    derived: NDArray[np.bool_] | None = None
    session: Labels | None = None
    request_class: Labels | None = None
    prefix_hashes: PrefixHashes | None = None


def settle(
    content: TraceContent,
    raw: RawRows,
    asked: RepairOptions,
    arrive: Callable[[int], NDArray[np.float64]] | None = None,
) -> tuple[RequestTrace, Repairs]:
    """Make a trace of the rows; raises `TraceError` about the first row with a fault that no asked repair covers.

    ``arrive(n)`` gives arrivals in seconds to n requests of a format without any.
    """
    nothing = np.zeros(raw.rows.size, dtype=np.bool_)
    dropped_failed = raw.failed if asked.drop_failed else nothing
    unreadable = ~raw.readable & ~dropped_failed
    dropped_invalid = unreadable if asked.drop_invalid else nothing
    faulty = unreadable & ~dropped_invalid
    first_fault = int(np.argmax(faulty)) if faulty.any() else None
    kept = np.flatnonzero(~(dropped_failed | dropped_invalid)[:first_fault])

    derived = nothing if raw.derived is None else raw.derived
    stamped = kept[~derived[kept]] if derived.any() else kept
    falls = nothing[:0] if raw.arrivals is None else raw.arrivals[stamped[1:]] < raw.arrivals[stamped[:-1]]
    if falls.any() and not asked.sort:
        later = int(np.argmax(falls))
        raise _order_fault(content, raw, int(stamped[later + 1]), int(stamped[later]))
    if first_fault is not None:
        field, what = raw.fault(first_fault)
        raise content.fault(int(raw.rows[first_fault]), field, what)
    if not kept.size:
        raise TraceError(f"{content.label}: no request is left after the repairs; expected at least one")

    sorted_rows = 0
    if raw.arrivals is not None and (falls.any() or derived.any()):
        in_file = raw.arrivals[stamped]
        sorted_rows = int((in_file < np.maximum.accumulate(in_file)).sum())
        kept = kept[np.argsort(raw.arrivals[kept], kind="stable")]
    prompts = raw.prompt_tokens[kept]
    clipped = 0
    if asked.clip_prompt is not None:
        clipped = int((prompts > asked.clip_prompt).sum())
        prompts = np.minimum(prompts, asked.clip_prompt)
    if raw.arrivals is None:
        assert arrive is not None, "a format without arrivals needs a process"
        arrival_s = arrive(int(kept.size))
    else:
        arrivals = raw.arrivals[kept]
        arrival_s = (arrivals - arrivals[0]) / raw.per_s
    trace = RequestTrace.of(
        arrival_s,
        prompts,
        raw.output_tokens[kept],
        source=content.label,
        session=None if raw.session is None else raw.session.take(kept),
        request_class=None if raw.request_class is None else raw.request_class.take(kept),
        prefix_hashes=None if raw.prefix_hashes is None else raw.prefix_hashes.take(kept),
    )
    return trace, Repairs(
        sorted_rows=sorted_rows,
        dropped_failed=int(dropped_failed.sum()),
        dropped_invalid=int(dropped_invalid.sum()),
        clipped_prompts=clipped,
        derived_arrivals=int(derived[kept].sum()),
    )


def _order_fault(content: TraceContent, raw: RawRows, later: int, before: int) -> TraceError:
    seen, previous = (quoted(raw.arrival_text(index)) for index in (later, before))
    what = (
        f"{seen} is earlier than {previous} in row {int(raw.rows[before])}; "
        "expected arrivals in order (--sort puts them in order)"
    )
    return content.fault(int(raw.rows[later]), raw.arrival_name, what)
