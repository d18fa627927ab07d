"""Result files: ``summary.json``, ``requests.parquet``, ``steps.parquet``, each written whole or not at all."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from harli_core.errors import ConfigError
from harli_core.records import COMPLETED, REJECTED, UNFINISHED, RequestBook, StepBook
from traces.whole_file import replace_file, replace_text, replaceable

NAMES = ("summary.json", "requests.parquet", "steps.parquet")
"""What `write_results` writes."""

REPORT = "report.html"
"""What a report adds."""

ROWS_A_GROUP = 1 << 16
STATE_NAMES = {COMPLETED: "completed", REJECTED: "rejected", UNFINISHED: "unfinished"}


@contextmanager
def prepared(out: Path, names: Sequence[str] = NAMES) -> Iterator[Path]:
    """Make the folder and prove that it can take ``names``, before the run and not after it; raises `ConfigError`.

    Gives the folder with ``..`` and links resolved, so that only what the results need is made.

    Folders that were made for a run that then failed are taken away again, unless something is in them.
    """
    made: list[Path] = []
    try:
        try:
            target = out.resolve()
            places = (target, *target.parents)
            made = [folder for folder in places if not folder.exists()]
            nearest = places[len(made)]
            if not nearest.is_dir():
                raise ConfigError(f"--out {out}: cannot write results there ({nearest} is a file, not a folder)")
            target.mkdir(parents=True, exist_ok=True)
            for name in names:
                _check_replaceable(target / name, out)
            with tempfile.TemporaryFile(dir=target):
                pass
        except OSError as error:
            raise ConfigError(f"--out {out}: cannot write results there ({error.strerror})") from None
        except RuntimeError:
            raise ConfigError(f"--out {out}: cannot write results there (its links go in a circle)") from None
        yield target
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


def _check_replaceable(path: Path, out: Path) -> None:
    try:
        replaceable(path)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot write {path.name} there ({error.strerror})") from None


def write_results(out: Path, summary: dict[str, Any], requests: RequestBook, steps: StepBook) -> None:
    """Write all three; the summary last, so that where it stands the others are complete."""
    replace_file(out / "requests.parquet", lambda file: _write_requests(file, requests))
    replace_file(out / "steps.parquet", lambda file: _write_steps(file, steps))
    text = json.dumps(summary, indent=2, sort_keys=True, allow_nan=False) + "\n"
    replace_text(out / "summary.json", text)


def discard_summary(out: Path) -> None:
    """Take away the summary of an earlier run: what is in the folder failed its audit."""
    (out / "summary.json").unlink(missing_ok=True)


def _write_requests(file: BinaryIO, book: RequestBook) -> None:
    import pyarrow as pa  # noqa: PLC0415  (a heavy import that only writing needs)
    import pyarrow.parquet as pq  # noqa: PLC0415

    def seconds(values: np.ndarray[Any, np.dtype[np.float64]]) -> pa.Array:
        return pa.array(values, from_pandas=True)

    arrived = np.isfinite(book.arrival_s).tolist()
    names = zip(book.state.tolist(), arrived, strict=True)
    states = pa.array([STATE_NAMES[state] if here else "not_arrived" for state, here in names])
    reasons = pa.array([book.reasons.get(index) for index in range(len(book))], type=pa.string())
    table = pa.table(
        {
            "request": np.arange(len(book), dtype=np.int64),
            "arrival_s": seconds(book.arrival_s),
            "prompt_tokens": book.prompt_tokens,
            "output_tokens": book.output_tokens,
            "instance": pa.array(book.instance, mask=book.instance < 0),
            "state": states,
            "reason": reasons,
            "first_token_s": seconds(book.first_token_s),
            "last_token_s": seconds(book.last_token_s),
            "ttft_s": seconds(book.ttft_s()),
            "tpot_s": seconds(book.tpot_s()),
            "produced_tokens": book.produced_tokens,
            "preemptions": book.preemptions,
        }
    )
    pq.write_table(table, file, compression="zstd")


def _write_steps(file: BinaryIO, steps: StepBook) -> None:
    """One row a step, in groups, so that the whole table never exists at once."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    integers = {
        "instance": np.int32, "batch": np.int32, "kv_tokens": np.int64, "waiting": np.int32,
        "decode_sms": np.int16, "finetune_sms": np.int16, "rows_kv": np.int32, "rows_lent": np.int32,
        "window_layers": np.int16, "free_but_unlendable_bytes": np.int64,
    }  # fmt: skip
    floats = ("turn_budget_ms", "predicted_ms", "finetune_tokens")
    schema = pa.schema(
        [
            ("step", pa.int64()),
            ("end_s", pa.float64()),
            ("latency_ms", pa.float64()),
            ("decode_ms", pa.float64()),
            ("turn_ms", pa.float64()),
            *((name, pa.from_numpy_dtype(dtype)) for name, dtype in integers.items()),
            *((name, pa.float64()) for name in floats),
        ]
    )
    every_step = ("latency_ms", "decode_ms", "turn_ms", "end_s")
    encoding = {
        "use_dictionary": [*integers, *floats],
        "use_byte_stream_split": list(every_step),
        "compression": "zstd",
    }
    with pq.ParquetWriter(file, schema, **encoding) as writer:
        for spans, rows in _groups(steps):
            counts = steps.span_steps()[spans].astype(np.int64)
            starts = np.cumsum(counts) - counts
            within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(starts, counts)
            latency_ms = np.frombuffer(steps.latency_ms)[rows]
            total_ms = np.cumsum(latency_ms)
            before_ms = np.repeat(total_ms[starts] - latency_ms[starts], counts)
            columns: dict[str, Any] = {
                name: np.repeat(steps.span_column(name)[spans].astype(integers.get(name, np.float64)), counts)
                for name in (*integers, *floats)
            }
            columns["kv_tokens"] += within * columns["batch"]
            columns["step"] = np.repeat(steps.span_column("first_step")[spans], counts) + within
            columns["end_s"] = np.repeat(steps.span_column("start_s")[spans], counts) + (total_ms - before_ms) / 1000.0
            columns["latency_ms"] = latency_ms
            columns["decode_ms"] = np.frombuffer(steps.decode_ms)[rows]
            columns["turn_ms"] = np.frombuffer(steps.turn_ms)[rows]
            arrays = [pa.array(columns[field.name], from_pandas=True) for field in schema]
            writer.write_batch(pa.record_batch(arrays, schema=schema))


def _groups(steps: StepBook) -> Iterator[tuple[slice, slice]]:
    """Slices of spans, and of their steps, with about ``ROWS_A_GROUP`` steps each."""
    ends = np.cumsum(steps.span_steps())
    first_span = first_row = 0
    while first_span < len(ends):
        last_span = max(int(np.searchsorted(ends, first_row + ROWS_A_GROUP, side="right")), first_span + 1)
        last_row = int(ends[last_span - 1])
        yield slice(first_span, last_span), slice(first_row, last_row)
        first_span, first_row = last_span, last_row
