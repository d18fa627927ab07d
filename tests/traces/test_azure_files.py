"""Azure files that are right are read exactly, however their lines end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harli_core.errors import TraceError
from tests.traces.azure import load_azure
from traces.schema import Repairs, RequestTrace

AzureFile = Callable[[bytes], Path]

LINES = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens",
    b"2024-02-29 23:59:59.9999999,374,44",
    b"2024-03-01 00:00:00,1,1",
    b"2024-03-01 00:00:00.5,999999999,7",
    b"2024-03-01 00:00:00.5000001,0012,1000",
)
EXPECTED = RequestTrace.of(
    [0, 1e-7, 0.5000001, 0.5000002], [374, 1, 999999999, 12], [44, 1, 7, 1000], source="the same by hand"
)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["no-mark", "byte-order-mark"])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("last", [b"", b"\r", b"\n", b"\r\n", b"\n\n\r\n\n"], ids=["none", "cr", "lf", "crlf", "blank"])
def test_line_ends_do_not_matter(azure_file: AzureFile, mark: bytes, line_end: bytes, last: bytes) -> None:
    """LF or CRLF, any end of the last line, blank lines at the end, a byte order mark: the same trace."""
    trace, repairs = load_azure(azure_file(mark + line_end.join(LINES) + last))
    assert trace == EXPECTED
    assert repairs == Repairs()


def test_line_ends_may_be_mixed(azure_file: AzureFile) -> None:
    """A file whose lines end now in LF, now in CRLF has the same rows."""
    content = LINES[0] + b"\r\n" + LINES[1] + b"\n" + LINES[2] + b"\r\n" + LINES[3] + b"\n" + LINES[4]
    assert load_azure(azure_file(content))[0] == EXPECTED


def test_one_request(azure_file: AzureFile) -> None:
    """A file of one row is a trace of one request at 0 s."""
    trace, _ = load_azure(azure_file(b"\n".join(LINES[:2])))
    assert (len(trace), trace.span_s, trace.prompt_tokens[0], trace.output_tokens[0]) == (1, 0.0, 374, 44)


def test_source_is_the_file(azure_file: AzureFile) -> None:
    """Reports can say which file a trace came from."""
    path = azure_file(b"\n".join(LINES))
    assert load_azure(path)[0].source == str(path)


def test_order_is_refused_without_sort(azure_file: AzureFile) -> None:
    """The first row that is earlier than the one before is named, and the way out with it."""
    content = b"\n".join((LINES[0], LINES[3], LINES[4], LINES[1], LINES[2]))
    with pytest.raises(TraceError, match=r": row 4, TIMESTAMP: '2024-02-29 .* row 3; .*--sort") as caught:
        load_azure(azure_file(content))
    assert "\n" not in str(caught.value)


def test_sort_is_a_counted_repair(azure_file: AzureFile) -> None:
    """Sorting gives the trace in order and counts the rows that stood too low."""
    trace, repairs = load_azure(azure_file(b"\n".join((LINES[0], LINES[3], LINES[4], LINES[1], LINES[2]))), sort=True)
    assert trace == EXPECTED
    assert repairs == Repairs(sorted_rows=2)


def test_sort_changes_nothing_that_is_in_order(azure_file: AzureFile) -> None:
    """A file in order is the same with and without, and no repair is counted."""
    assert load_azure(azure_file(b"\n".join(LINES)), sort=True) == (EXPECTED, Repairs())


def test_equal_stamps_keep_their_order(azure_file: AzureFile) -> None:
    """Requests of one stamp are in order as they stand, and sorting does not swap them."""
    rows = b"2024-01-01 00:00:01,1,1\n" * 20 + b"2024-01-01 00:00:01,2,1\n" * 20 + b"2024-01-01 00:00:00,3,1\n"
    trace, repairs = load_azure(azure_file(LINES[0] + b"\n" + rows), sort=True)
    assert trace.prompt_tokens.tolist() == [3, *[1] * 20, *[2] * 20]
    assert repairs == Repairs(sorted_rows=1)


def test_a_fault_is_found_before_a_later_disorder(azure_file: AzureFile) -> None:
    """Of two faults the first one in the file is told."""
    rows = (b"2024-01-01 00:00:05,1,0", b"2024-01-01 00:00:01,1,1")
    with pytest.raises(TraceError, match="row 2, GeneratedTokens"):
        load_azure(azure_file(b"\n".join((LINES[0], *rows))))


def test_a_disorder_is_found_before_a_later_fault(azure_file: AzureFile) -> None:
    """Of two faults the first one in the file is told, also when it is the order."""
    rows = (b"2024-01-01 00:00:05,1,1", b"2024-01-01 00:00:01,1,1", b"2024-01-01 00:00:01,1")
    with pytest.raises(TraceError, match="row 3, TIMESTAMP"):
        load_azure(azure_file(b"\n".join((LINES[0], *rows))))


@pytest.mark.parametrize(
    ("name", "requests", "span_s", "prompt_tokens", "output_tokens"),
    [
        ("conv", 19_366, 3501.721937, 22_361_870, 4_088_665),
        ("code", 8_819, 3435.948056, 18_059_974, 245_896),
    ],
)
def test_public_files(
    shared: Path, name: str, requests: int, span_s: float, prompt_tokens: int, output_tokens: int
) -> None:
    """The two public files give the counts, the span and the sums that are known of them."""
    trace, repairs = load_azure(shared / "traces" / "azure" / f"AzureLLMInferenceTrace_{name}.csv")
    assert (len(trace), repairs) == (requests, Repairs())
    assert trace.span_s == span_s
    assert (trace.prompt_tokens.sum(), trace.output_tokens.sum()) == (prompt_tokens, output_tokens)


def test_means_of_the_public_conversation_file(shared: Path) -> None:
    """The conversation file's published means: 1,154.7 tokens in and 211.1 out."""
    trace, _ = load_azure(shared / "traces" / "azure" / "AzureLLMInferenceTrace_conv.csv")
    means = (trace.prompt_tokens.mean(), trace.output_tokens.mean())
    assert np.round(means, 1).tolist() == [1154.7, 211.1]
