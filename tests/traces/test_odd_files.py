"""Files that nobody would call a trace: each is one printable line with exit from the loader, never anything else."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pyarrow as pa
import pytest

from harli_core.errors import TraceError
from tests.traces.samples import FILES
from traces.registry import load_trace

AZURE, VIDUR, MOONCAKE = FILES["azure-2023"], FILES["vidur"], FILES["mooncake"]
HEAD = b"arrived_at,num_prefill_tokens,num_decode_tokens\n"
LINE = b'{"timestamp": 0, "input_length": 5, "output_length": 6, "hash_ids": [0]}\n'

ODD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "mark only": (b"\xef\xbb\xbf", "is empty"),
    "blanks": (b" \n\t\n", "is empty"),
    "nul bytes": (b"\0" * 5000, "fit no known format"),
    "binary": (bytes(range(256)) * 40, "fit no known format"),
    "utf-16": (VIDUR.decode().encode("utf-16"), "fit no known format"),
    "cr only csv": (VIDUR.replace(b"\n", b"\r"), "carriage return alone"),
    "cr only jsonl": (MOONCAKE.replace(b"\n", b"\r"), "carriage return"),
    "cr within a line": (HEAD + b"0\r,1,1\n", "row 2, arrived_at"),
    "quoted cells": (HEAD + b'"0","1","1"\n', "row 2, arrived_at"),
    "quoted header": (b'"arrived_at","num_prefill_tokens","num_decode_tokens"\n0,1,1\n', "fit no known format"),
    "header twice": (HEAD + HEAD + b"0,1,1\n", "row 2, arrived_at: 'arrived_at'"),
    "column twice": (b"arrived_at,arrived_at,num_prefill_tokens,num_decode_tokens\n0,0,1,1\n", "fit no known format"),
    "column too many": (b"arrived_at,num_prefill_tokens,num_decode_tokens,who\n0,1,1,1\n", "fit no known format"),
    "no header": (b"0,1,1\n1,1,1\n", "fit no known format"),
    "header only": (HEAD, "row 2: the file ends"),
    "cut line": (HEAD + b"0,1,1\n0.5,1", "cut off"),
    "blank line within": (HEAD + b"0,1,1\n\n1,1,1\n", "row 3, arrived_at: the line is blank"),
    "blank first line": (b"\n" + VIDUR, "fit no known format"),
    "exponent": (HEAD + b"0,1e3,1\n", "row 2, num_prefill_tokens: '1e3'"),
    "twenty digits": (HEAD + b"0,18446744073709551617,1\n", "too large"),
    "twenty digits of time": (HEAD + b"18446744073709551617,1,1\n", "row 2, arrived_at"),
    "nan": (HEAD + b"0,nan,1\n", "not a finite number"),
    "nan time": (HEAD + b"nan,1,1\n", "not a finite number"),
    "inf time": (HEAD + b"inf,1,1\n", "not a finite number"),
    "negative time": (HEAD + b"-1,1,1\n", "is negative"),
    "immense exponent": (HEAD + b"1e999,1,1\n", "too large"),
    "hexadecimal": (HEAD + b"0,0x10,1\n", "row 2, num_prefill_tokens"),
    "semicolons": (HEAD.replace(b",", b";") + b"0;1;1\n", "fit no known format"),
    "tabs": (HEAD.replace(b",", b"\t") + b"0\t1\t1\n", "fit no known format"),
    "decimal comma": (HEAD + b"0,5,1,1\n", "row 2, after num_decode_tokens"),
    "giant line": (b"x" * 5_000_000, "fit no known format"),
    "giant header": (b"," * 5_000_000 + b"\n", "fit no known format"),
    "giant cell": (HEAD + b"9" * 5_000_000 + b",1,1\n", "row 2, arrived_at"),
    "giant row": (HEAD + b"," * 1_000_000 + b"\n", "1000001 fields"),
    "unsorted": (HEAD + b"1,1,1\n0,1,1\n", "row 3, arrived_at: '0' is earlier than '1' in row 2"),
    "zones mixed": (AZURE + b"2024-05-10 00:00:05+00:00,1,1\n", "row 8, TIMESTAMP"),
    "other zone": (FILES["azure-2024"].replace(b"+00:00", b"+02:00"), "row 2, TIMESTAMP"),
    "batch of two": (FILES["splitwise-sim"].replace(b",1,374,", b",2,374,"), "row 2, batch_size"),
    "wrong sum": (FILES["burstgpt"].replace(b"374,44,418", b"374,44,419"), "row 2, Total tokens: '419' is not the sum"),
    "json array": (b'[{"timestamp": 0}]\n', "is no JSON object"),
    "json array over lines": (b"[\n" + LINE + b"]\n", "is not JSON"),
    "pretty json": (b'{\n "timestamp": 0\n}\n', "is not JSON"),
    "json nan": (LINE + LINE.replace(b"5", b"NaN"), "row 2: 'NaN' is not a finite number"),
    "json infinity": (LINE + LINE.replace(b"5", b"-Infinity"), "row 2: '-Infinity'"),
    "json exponent": (LINE + LINE.replace(b"5", b"1e3"), "row 2, input_length: '1e3' is not a whole number"),
    "json text": (LINE + LINE.replace(b"5", b'"5"'), "row 2, input_length: '5' is not a number"),
    "json true": (LINE + LINE.replace(b"5", b"true"), "row 2, input_length: 'true' is not a number"),
    "json key twice": (LINE + LINE.replace(b'"input_length"', b'"timestamp"'), "row 2: the key 'timestamp' stands twice"),
    "json two in a line": (LINE + LINE.strip() + LINE, "row 2: "),
    "json deep": (LINE + b'{"timestamp": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n", "row 2: "),
    "json long number": (LINE + LINE.replace(b"5", b"9" * 5000), "too many digits"),
    "json blank within": (LINE + b"\n" + LINE, "row 2: the line is blank"),
    "json cut": (LINE + LINE[:30], "row 2: "),
    "json not utf-8": (LINE + LINE.replace(b"hash_ids", b"hash\xffids"), "not UTF-8"),
    "json number": (LINE + b"7\n", "row 2: '7' is no JSON object"),
    "json hashes": (LINE + LINE.replace(b"[0]", b"[0.5]"), "row 2, hash_ids"),
    "json empty object": (b"{}\n", "fit no known format"),
    "json no calls": (b'{"arrival_time_ns": 0, "sub_requests": []}\n', "row 1, sub_requests"),
    "json endless wait": (
        b'{"arrival_time_ns": 0, "sub_requests": ['
        + b",".join([b'{"input_toks": 1, "output_toks": 1, "tool_duration_ns": 4611686018427387903}'] * 3) + b"]}\n",
        "row 1, sub_requests",
    ),
    "gz of nothing": (gzip.compress(b""), "is empty"),
    "gz of garbage": (gzip.compress(os.urandom(0) + b"\x80\x81garbage"), "fit no known format"),
    "gz cut": (gzip.compress(VIDUR)[:-9], "cannot be unpacked"),
    "gz damaged": (gzip.compress(VIDUR)[:-8] + b"\0" * 8, "cannot be unpacked"),
    "gz then text": (gzip.compress(VIDUR) + b"0,1,1\n", "cannot be unpacked"),
    "gz of gz": (gzip.compress(gzip.compress(VIDUR)), "packed twice"),
    "gz head only": (b"\x1f\x8b", "cannot be unpacked"),
    "zstd head only": (b"\x28\xb5\x2f\xfd", "zstd"),
    "zstd cut": (bytes(pa.Codec("zstd").compress(VIDUR * 50, asbytes=True))[:-20], "zstd"),
    "parquet head only": (b"PAR1", "no complete Parquet file"),
    "parquet cut": (FILES["harli-parquet"][:-30], "no complete Parquet file"),
    "zip": (b"PK\x03\x04" + b"\0" * 60, "fit no known format"),
    "bzip2": (b"BZh91AY&SY" + b"\0" * 60, "fit no known format"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_refused_in_one_line(tmp_path: Path, name: str) -> None:
    """The line says what is wrong, and is short enough to read."""
    content, words = ODD[name]
    path = tmp_path / "odd"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        load_trace(str(path), seed=0)
    message = str(caught.value)
    assert message.isprintable()
    assert words in message
    assert len(message) < 2500


def test_folder(tmp_path: Path) -> None:
    """A folder is told from a file."""
    with pytest.raises(TraceError, match="is a directory"):
        load_trace(str(tmp_path), seed=0)


def test_pipe_without_a_writer(tmp_path: Path) -> None:
    """A named pipe that nobody writes to is empty; it is not waited for."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="is empty"):
        load_trace(str(tmp_path / "pipe"), seed=0)


def test_pipe_that_is_written_to() -> None:
    """A pipe with content is read like a file."""
    reader, writer = os.pipe()
    os.write(writer, VIDUR)
    os.close(writer)
    assert load_trace(f"/dev/fd/{reader}", seed=0).format == "vidur"
    os.close(reader)


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
def test_devices(device: str) -> None:
    """A device has no end, or nothing in it."""
    with pytest.raises(TraceError, match="it is a device"):
        load_trace(device, seed=0)
