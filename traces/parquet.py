"""Our own Parquet files: the same columns as our CSV, ``prefix_hashes`` as a list."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.content import TraceContent, quoted
from traces.digits import MAX_DIGITS, MAX_SECONDS
from traces.labels import Labels, PrefixHashes
from traces.rows import RawRows

MAGIC = b"PAR1"
NEEDED = ("arrival_s", "prompt_tokens", "output_tokens")
OPTIONAL = ("session", "request_class", "prefix_hashes")
SHAPE = "Parquet: " + ",".join((*NEEDED, *(f"[{name}]" for name in OPTIONAL)))

_LARGEST_TOKENS = 10**MAX_DIGITS - 1


def is_parquet(content: TraceContent) -> bool:
    """Tell by the first bytes."""
    return content.text.startswith(MAGIC)


def parse_parquet(content: TraceContent) -> RawRows:
    """Read the columns; a row is named by its place in the file, the first one being row 1."""
    import pyarrow as pa  # noqa: PLC0415  (heavy imports that only such files need)
    import pyarrow.parquet as pq  # noqa: PLC0415

    if not is_parquet(content):
        raise content.fault(1, None, f"begins with {quoted(content.header[:8])}; expected a Parquet file")
    try:
        file = pq.ParquetFile(pa.BufferReader(content.text), page_checksum_verification=True)
        names = file.schema_arrow.names
        if len(set(names)) != len(names) or not set(NEEDED) <= set(names) <= {*NEEDED, *OPTIONAL}:
            raise content.fault(1, None, f"the columns are {quoted(','.join(names))}; expected {SHAPE!r}")
        table = file.read()
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = quoted(" ".join(str(error).split()))
        raise content.fault(1, None, f"is no complete Parquet file ({reason}); is it cut off?") from None
    if not table.num_rows:
        raise content.fault(1, None, "the file has no rows; expected at least one request")
    _check_types(content, table, pa)

    arrivals = table["arrival_s"].cast(pa.float64()).to_numpy()
    columns: dict[str, NDArray[Any]] = {"arrival_s": arrivals}
    good = {"arrival_s": (arrivals >= 0) & (arrivals < MAX_SECONDS)}  # false for NaN, which null becomes
    for name in NEEDED[1:]:
        absent = table[name].is_null().to_numpy()
        values = table[name].cast(pa.int64(), safe=False).fill_null(0).to_numpy()
        columns[name], good[name] = values, ~absent & (values >= 1) & (values <= _LARGEST_TOKENS)
    hashes = None
    if "prefix_hashes" in table.column_names:
        lists = [one if one is not None else [] for one in table["prefix_hashes"].to_pylist()]
        fine = np.array([all(h is not None and h >= 0 for h in one) for one in lists], dtype=np.bool_)
        good["prefix_hashes"] = fine
        hashes = PrefixHashes.of([one if ok else [] for one, ok in zip(lists, fine.tolist(), strict=True)])

    def fault(index: int) -> tuple[str | None, str]:
        name = next(name for name, fine in good.items() if not fine[index])
        right = {
            "arrival_s": f"a time from 0 to under {MAX_SECONDS:.0e} s",
            "prefix_hashes": "whole numbers of 0 or more",
        }.get(name, f"a whole number from 1 to {_LARGEST_TOKENS}")
        return name, f"{quoted(str(table[name][index].as_py()))} is wrong; expected {right}"

    return RawRows(
        rows=np.arange(1, table.num_rows + 1, dtype=np.int64),
        arrivals=np.where(good["arrival_s"], arrivals, 0.0),
        per_s=1,
        arrival_name="arrival_s",
        prompt_tokens=columns["prompt_tokens"],
        output_tokens=columns["output_tokens"],
        readable=np.logical_and.reduce(list(good.values())),
        failed=np.zeros(table.num_rows, dtype=np.bool_),
        fault=fault,
        arrival_text=lambda index: str(arrivals[index]),
        session=_labels(table, "session"),
        request_class=_labels(table, "request_class"),
        prefix_hashes=hashes,
    )


def _check_types(content: TraceContent, table: Any, pa: Any) -> None:
    for name in table.column_names:
        found = table.schema.field(name).type
        if name in ("session", "request_class"):
            fits = pa.types.is_string(found) or pa.types.is_large_string(found)
        elif name == "prefix_hashes":
            is_list = pa.types.is_list(found) or pa.types.is_large_list(found)
            fits = is_list and found.value_type == pa.int64()
        else:
            fits = pa.types.is_integer(found) or (name == "arrival_s" and pa.types.is_float64(found))
        if not fits:
            right = {"session": "text", "request_class": "text", "prefix_hashes": "lists of int64"}
            wanted = right.get(name, "float64" if name == "arrival_s" else "whole numbers")
            raise content.fault(1, name, f"the column holds {found}; expected {wanted}")


def _labels(table: Any, name: str) -> Labels | None:
    return Labels.of(table[name].to_pylist()) if name in table.column_names else None
