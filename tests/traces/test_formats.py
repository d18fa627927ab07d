"""Every public format gives the same requests, told by its header or keys, packed or not."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pytest

from harli_core.errors import ConfigError, TraceError
from tests.traces.samples import ARRIVAL_S, CSV, FILES, OUTPUTS, PROMPTS, csv_bytes, json_bytes, rate_for
from traces.registry import load_trace
from traces.schema import LoadedTrace, RepairOptions, Repairs


def load(tmp_path: Path, content: bytes, name: str = "", **options: bool) -> LoadedTrace:
    """Write and read a file whose name says nothing."""
    path = tmp_path / "requests.dat"
    path.write_bytes(content)
    return load_trace(str(path), seed=0, rate_rps=rate_for(name), repairs=RepairOptions(**options))


@pytest.mark.parametrize("name", FILES)
def test_read(tmp_path: Path, name: str) -> None:
    """Format, arrivals from the first request and lengths come out right, and nothing was repaired."""
    loaded = load(tmp_path, FILES[name], name)
    assert (loaded.format, loaded.repairs) == (name.split(maxsplit=1)[0], Repairs())
    assert loaded.trace.prompt_tokens.tolist() == [*PROMPTS]
    assert loaded.trace.output_tokens.tolist() == [*OUTPUTS]
    if name != "vidur-lengths":
        assert loaded.trace.arrival_s.tolist() == [*ARRIVAL_S]


@pytest.mark.parametrize("name", FILES)
def test_packed(tmp_path: Path, name: str) -> None:
    """gzip (in two members, too) and zstd are seen through, and told."""
    content = FILES[name]
    plain = load(tmp_path, content, name)
    half = len(content) // 2
    packed = {
        "gzip": gzip.compress(content[:half]) + gzip.compress(content[half:]),
        "zstd": pa.Codec("zstd").compress(content, asbytes=True),
    }
    for compression, bytes_of_it in packed.items():
        loaded = load(tmp_path, bytes_of_it, name)
        assert (loaded.trace, loaded.format) == (plain.trace, plain.format)
        assert f"unpacked from {compression}" in loaded.reason


@pytest.mark.parametrize("name", CSV)
def test_columns_in_another_order(tmp_path: Path, name: str) -> None:
    """Columns are told by name."""
    turned = csv_bytes(dict(reversed(CSV[name].items())))
    assert load(tmp_path, turned, name).trace == load(tmp_path, FILES[name], name).trace


@pytest.mark.parametrize("name", FILES)
def test_line_ends_and_marks(tmp_path: Path, name: str) -> None:
    """CRLF, a byte order mark, blank lines at the end or no line end: the same trace."""
    if name == "harli-parquet":
        pytest.skip("not text")
    trace = load(tmp_path, FILES[name], name).trace
    variants = (
        FILES[name].replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + FILES[name],
        FILES[name] + b"\n\r\n\n",
        FILES[name].rstrip(b"\n"),
    )
    for content in variants:
        assert load(tmp_path, content, name).trace == trace


def test_what_else_a_file_says(tmp_path: Path) -> None:
    """Sessions, classes and prefix hashes are kept where the format has them."""
    own, burst = (load(tmp_path, FILES[name]).trace for name in ("harli-csv", "burstgpt v1.2"))
    bailian, mooncake = (load(tmp_path, FILES[name]).trace for name in ("bailian", "mooncake"))
    assert own.session is not None
    assert own.session.values() == ["a", None, "a", "b", None, "c"]
    assert own.prefix_hashes is not None
    assert own.prefix_hashes.lists() == [[1, 2], [], [1, 2, 3], [9], [], [0]]
    assert burst.request_class is not None
    assert burst.request_class.values() == ["ChatGPT", "GPT-4"] * 3
    assert bailian.session is not None
    assert bailian.session.values() == ["1", "1", "1", "4", "5", "6"]
    assert mooncake.prefix_hashes is not None
    assert mooncake.prefix_hashes.lists()[4] == [0, 4]


def test_calls_of_a_session_follow_each_other(tmp_path: Path) -> None:
    """A chained call arrives as long after the one before as the tool runs; such arrivals are counted."""
    chain = [{"input_toks": 5, "output_toks": 6, "tool_duration_ns": 2 * 10**9}] * 3
    records = [
        {"session_id": "a", "arrival_time_ns": 0, "sub_requests": chain},
        {"session_id": "b", "arrival_time_ns": 10**9, "sub_requests": chain[:1]},
        {"arrival_time_ns": 3 * 10**9, "input_toks": 7, "output_toks": 8},
    ]
    loaded = load(tmp_path, json_bytes(records))
    assert loaded.trace.arrival_s.tolist() == [0, 1, 2, 3, 4]
    assert loaded.trace.prompt_tokens.tolist() == [5, 5, 5, 7, 5]
    assert loaded.repairs == Repairs(derived_arrivals=2)


def test_a_delay_follows_the_turn_before(tmp_path: Path) -> None:
    """An aiperf turn with a delay arrives that long after the one before; without one before it is a fault."""
    first = {"session_id": "a", "timestamp": 500, "input_length": 5, "output_length": 6}
    turn = {"session_id": "a", "delay": 1500, "input_length": 7, "output_length": 8}
    loaded = load(tmp_path, json_bytes([first, turn]))
    assert (loaded.trace.arrival_s.tolist(), loaded.repairs.derived_arrivals) == ([0.0, 1.5], 1)
    with pytest.raises(TraceError, match="row 2, delay: there is no earlier turn"):
        load(tmp_path, json_bytes([first, {**turn, "session_id": "b"}]))


def test_lengths_need_a_rate(tmp_path: Path) -> None:
    """A file without arrivals says so; with a rate it gets Poisson arrivals; with arrivals a rate is refused."""
    with pytest.raises(TraceError, match="no arrivals; expected --rate"):
        load(tmp_path, FILES["vidur-lengths"])
    with pytest.raises(ConfigError, match="has arrivals of its own"):
        load(tmp_path, FILES["vidur"], "vidur-lengths")


def test_format_overrides_the_header(tmp_path: Path) -> None:
    """A format that is asked for is the one that is tried."""
    path = tmp_path / "x"
    path.write_bytes(FILES["vidur"])
    with pytest.raises(TraceError, match=r"row 1: the columns are 'arrived_at.*expected 'Timestamp"):
        load_trace(str(path), seed=0, format_name="burstgpt")
    with pytest.raises(ConfigError, match="unknown trace format 'csv': known formats are azure-2023, "):
        load_trace(str(path), seed=0, format_name="csv")


def test_failed_requests(tmp_path: Path) -> None:
    """BurstGPT's zero responses are an error that names the way out, or a counted repair."""
    columns = {name: list(values) for name, values in CSV["burstgpt"].items()}
    columns["Response tokens"][2], columns["Total tokens"][2] = "0", "4085"
    with pytest.raises(TraceError, match=r"row 4, Response tokens: '0' marks a request that failed.*--drop-failed"):
        load(tmp_path, csv_bytes(columns))
    loaded = load(tmp_path, csv_bytes(columns), drop_failed=True)
    assert (len(loaded.trace), loaded.repairs) == (5, Repairs(dropped_failed=1))


def test_clip_prompt_is_counted(tmp_path: Path) -> None:
    """Prompts over the limit are cut to it, the others stay."""
    path = tmp_path / "x"
    path.write_bytes(FILES["mooncake"])
    loaded = load_trace(str(path), seed=0, repairs=RepairOptions(clip_prompt=1000))
    assert loaded.trace.prompt_tokens.tolist() == [374, 91, 1000, 12, 1000, 1]
    assert loaded.repairs == Repairs(clipped_prompts=2)


@pytest.mark.parametrize(
    ("file", "name", "requests", "span_s"),
    [
        ("mooncake/conversation_trace.jsonl", "mooncake", 12_031, 3536.999),
        ("formats/llmservingsim_example_trace.jsonl", "llmservingsim", 10, 0.980043269),
        ("formats/splitwise_sim_test_trace.csv", "splitwise-sim", 3, 3.0),
        ("formats/vidur_splitwise_conv_head.csv", "vidur", 199, 61.145266),
    ],
)
def test_public_files(shared: Path, file: str, name: str, requests: int, span_s: float) -> None:
    """Public files are recognised and read whole."""
    loaded = load_trace(str(shared / "traces" / file), seed=0)
    assert (loaded.format, len(loaded.trace), loaded.repairs) == (name, requests, Repairs())
    assert loaded.trace.span_s == pytest.approx(span_s, abs=1e-9)


def test_public_mooncake_ticks(shared: Path) -> None:
    """The Mooncake file has 1,180 different arrivals and outputs from 1."""
    trace = load_trace(str(shared / "traces" / "mooncake" / "conversation_trace.jsonl"), seed=0).trace
    assert (len(set(trace.arrival_s.tolist())), trace.output_tokens.min()) == (1180, 1)
