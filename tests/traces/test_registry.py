"""One way in for every trace: by the word ``synthetic`` or by a path, told apart by the header."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import traces
from harli_core.errors import ConfigError, TraceError
from traces.content import TraceContent
from traces.registry import FORMATS, TraceFormat, load_trace
from traces.rows import RawRows
from traces.schema import RepairOptions, Repairs

AzureFile = Callable[[bytes], Path]

AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n2023-11-16 18:15:45,1,2\n"
SYNTHETIC_SHA256 = "447370b7931cf0925dc9f3c7458f842ad76f0b65f5a853716212bbe2bcf45003"


def test_synthetic_is_the_same_bytes_everywhere() -> None:
    """The bundled trace of seed 0 is pinned: a change of the generator or of numpy's bit stream must be seen."""
    loaded = load_trace("synthetic", seed=0)
    columns = (loaded.trace.arrival_s, loaded.trace.prompt_tokens, loaded.trace.output_tokens)
    assert (loaded.format, loaded.repairs) == ("synthetic", Repairs())
    assert hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest() == SYNTHETIC_SHA256


def test_synthetic_is_an_hour() -> None:
    """The bundled trace covers an hour of 5.53 requests a second, give or take the drift of its rate."""
    trace = load_trace("synthetic", seed=0).trace
    assert 3590 < trace.span_s < 3600
    assert 14_000 < len(trace) < 26_000


def test_synthetic_depends_on_the_seed() -> None:
    """Another seed is another trace."""
    assert load_trace("synthetic", seed=1).trace != load_trace("synthetic", seed=2).trace


def test_negative_seed() -> None:
    """A seed below 0 is refused in one line."""
    with pytest.raises(ConfigError, match="seed is -1; expected a whole number of 0 or more"):
        load_trace("synthetic", seed=-1)


def test_file_is_recognised_by_its_header(azure_file: AzureFile) -> None:
    """The format is found whatever the file is called, and the repair that was asked for is counted."""
    loaded = load_trace(str(azure_file(AZURE)), seed=0, repairs=RepairOptions(sort=True))
    assert (loaded.format, len(loaded.trace), loaded.repairs) == ("azure-2023", 2, Repairs(sorted_rows=1))


def test_nothing_is_repaired_unasked(azure_file: AzureFile) -> None:
    """Without ``sort`` the same file is refused."""
    with pytest.raises(TraceError, match="--sort"):
        load_trace(str(azure_file(AZURE)), seed=0)


def test_unknown_header_lists_what_was_seen_and_what_is_known(azure_file: AzureFile) -> None:
    """A file in no known format is refused with its own columns and those of every format."""
    path = azure_file(b"when,how_much\n1,2\n")
    with pytest.raises(TraceError) as caught:
        load_trace(str(path), seed=0)
    message = str(caught.value)
    assert message.startswith(f"{path}: row 1: the columns 'when,how_much' fit no known format; known: ")
    assert message.isprintable()
    assert all(f"{name} (" in message for name in FORMATS)


def test_missing_file_says_so() -> None:
    """A path that leads nowhere is refused before any format is tried."""
    with pytest.raises(TraceError, match=r"^no/such/file: no such file"):
        load_trace("no/such/file", seed=0)


def one_request(content: TraceContent) -> RawRows:
    """A parser for any content: one request."""
    one = np.ones(1, dtype=np.int64)
    return RawRows(
        rows=one, arrivals=one, per_s=1, arrival_name="when", prompt_tokens=one * len(content.text), output_tokens=one,
        readable=one == 1, failed=one == 0, fault=lambda _: (None, ""), arrival_text=lambda _: "",
    )  # fmt: skip


def test_a_format_is_one_entry(azure_file: AzureFile) -> None:
    """A new format needs a name, a way to recognise it and a parser, nothing else."""
    pipes = TraceFormat("when|how_much", lambda content: b"|" in content.header, one_request)
    loaded = load_trace(str(azure_file(b"when|how_much\n")), seed=0, formats={**FORMATS, "pipes": pipes})
    assert (loaded.format, loaded.trace.prompt_tokens.tolist()) == ("pipes", [14])


def test_ambiguous_files_are_refused(azure_file: AzureFile) -> None:
    """A file that fits two formats is read as neither."""
    greedy = TraceFormat("anything", lambda content: True, one_request)
    with pytest.raises(TraceError, match=r"fit several formats \(azure-2023, greedy\)"):
        load_trace(str(azure_file(AZURE)), seed=0, formats={**FORMATS, "greedy": greedy})


def test_import_reads_no_file_and_stays_light() -> None:
    """Importing the package loads neither pyarrow nor pandas nor simpy, which a replay need not pay for."""
    code = "import sys, traces; print(sorted({'pyarrow', 'pandas', 'simpy', 'sklearn'} & set(sys.modules)))"
    root = Path(traces.__file__).parents[1]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
