"""Traces in our own formats, each file written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harli_core.errors import ConfigError
from traces.schema import RequestTrace
from traces.whole_file import replace_file

ENDINGS = (".csv", ".csv.gz", ".csv.zst", ".parquet")
"""What the name of a written trace may end in; it decides the format."""

_ROWS_A_BLOCK = 1 << 16


def check_ending(path: Path) -> None:
    """Raise `ConfigError` for a name that says no format."""
    if not path.name.endswith(ENDINGS):
        raise ConfigError(f"{path}: the name says no format; expected one that ends in {', '.join(ENDINGS)}")


def write_trace(path: Path, trace: RequestTrace) -> None:
    """Replace ``path`` in one step; raises `ConfigError` where that cannot be done. Reading it gives an equal trace."""
    check_ending(path)
    try:
        if path.name.endswith(".parquet"):
            replace_file(path, lambda file: _write_parquet(file, trace))
        else:
            replace_file(path, lambda file: _write_csv(file, trace, path.suffix))
    except ValueError as error:
        raise ConfigError(f"cannot write {path}: {error}") from None


def _write_csv(file: Any, trace: RequestTrace, suffix: str) -> None:
    import pyarrow as pa  # noqa: PLC0415  (only packed files need it)

    codec = {".gz": "gzip", ".zst": "zstd"}.get(suffix)
    if codec is None:
        for block in _csv_blocks(trace):
            file.write(block)
        return
    packed = pa.BufferOutputStream()
    with pa.CompressedOutputStream(packed, codec) as stream:
        for block in _csv_blocks(trace):
            stream.write(block)
    file.write(packed.getvalue())


def _csv_blocks(trace: RequestTrace) -> Iterator[bytes]:
    """Header, then lines; times as the shortest text that reads back to the same number."""
    names = ["arrival_s", "prompt_tokens", "output_tokens"]
    extras: list[list[str]] = []
    for name in ("session", "request_class"):
        labels = getattr(trace, name)
        if labels is not None:
            names.append(name)
            extras.append([_cell(name, value) for value in labels.values()])
    if trace.prefix_hashes is not None:
        names.append("prefix_hashes")
        extras.append([" ".join(map(str, hashes)) for hashes in trace.prefix_hashes.lists()])
    yield (",".join(names) + "\n").encode()
    for at in range(0, len(trace), _ROWS_A_BLOCK):
        part = slice(at, at + _ROWS_A_BLOCK)
        columns: list[list[str]] = [
            [repr(value) for value in trace.arrival_s[part].tolist()],
            [str(value) for value in trace.prompt_tokens[part].tolist()],
            [str(value) for value in trace.output_tokens[part].tolist()],
            *(extra[part] for extra in extras),
        ]
        yield "".join(",".join(row) + "\n" for row in zip(*columns, strict=True)).encode()


def _cell(name: str, value: str | None) -> str:
    if value is None:
        return ""
    if not value or any(one in value for one in ',"\r\n\0'):
        raise ConfigError(f"the {name} {value[:48]!r} cannot stand in a CSV file; write .parquet instead")
    return value


def _write_parquet(file: Any, trace: RequestTrace) -> None:
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    columns: dict[str, Any] = {
        "arrival_s": trace.arrival_s,
        "prompt_tokens": trace.prompt_tokens,
        "output_tokens": trace.output_tokens,
    }
    for name in ("session", "request_class"):
        labels = getattr(trace, name)
        if labels is not None:
            columns[name] = pa.array(labels.values(), type=pa.string())
    if trace.prefix_hashes is not None:
        columns["prefix_hashes"] = pa.array(trace.prefix_hashes.lists(), type=pa.list_(pa.int64()))
    pq.write_table(pa.table(columns), file, compression="zstd", write_page_checksum=True)
