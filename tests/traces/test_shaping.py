"""Parts, copies and other speeds of a trace, and traces written and read again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harli_core.errors import ConfigError
from tests.traces.samples import FILES
from traces.labels import Labels, PrefixHashes
from traces.registry import load_trace
from traces.schema import RequestTrace
from traces.shaping import Shape, shaped
from traces.writing import ENDINGS, write_trace

TRACE = RequestTrace.of(
    [0, 1, 2, 4, 8],
    [10, 20, 30, 40, 50],
    [1, 2, 3, 4, 5],
    source="a test",
    session=Labels.of(["a", None, "b", "a", "c"]),
    request_class=Labels.of(["x", "y", None, "x", "x"]),
    prefix_hashes=PrefixHashes.of([[1], [], [2, 3], [4], [2**63 - 1]]),
)


def test_nothing_asked_nothing_changed() -> None:
    """Without any option the trace is the same object."""
    assert shaped(TRACE, Shape()) is TRACE


def test_window() -> None:
    """The window keeps its start and leaves out its end; names and hashes go with their requests."""
    part = shaped(TRACE, Shape(start_s=1, duration_s=3))
    assert (part.arrival_s.tolist(), part.prompt_tokens.tolist()) == ([0, 1], [20, 30])
    assert part.session is not None
    assert part.session.values() == [None, "b"]
    assert part.prefix_hashes is not None
    assert part.prefix_hashes.lists() == [[], [2, 3]]


def test_limit() -> None:
    """The first requests are kept."""
    assert shaped(TRACE, Shape(limit=2)).prompt_tokens.tolist() == [10, 20]
    assert shaped(TRACE, Shape(limit=99)) is TRACE


def test_repeat() -> None:
    """Copies follow each other with the mean gap (2 s) between them."""
    twice = shaped(TRACE, Shape(repeat=2))
    assert twice.arrival_s.tolist() == [0, 1, 2, 4, 8, 10, 11, 12, 14, 18]
    assert twice.prompt_tokens.tolist() == [10, 20, 30, 40, 50] * 2


def test_rate_scale() -> None:
    """Twice the rate takes half the time."""
    assert shaped(TRACE, Shape(rate_scale=2)).arrival_s.tolist() == [0, 0.5, 1, 2, 4]


def test_order_of_the_options() -> None:
    """Window, limit, repeat, rate."""
    made = shaped(TRACE, Shape(start_s=1, duration_s=7, limit=2, repeat=2, rate_scale=0.5))
    assert made.arrival_s.tolist() == [0, 2, 4, 6]
    assert made.prompt_tokens.tolist() == [20, 30, 20, 30]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (Shape(start_s=9), "no request of a test"),
        (Shape(start_s=5, duration_s=1), "no request of a test"),
        (Shape(limit=1, repeat=2), "arrive at once"),
        (Shape(repeat=10**6, rate_scale=1), None),
        (Shape(rate_scale=1e-320), "out of range"),
    ],
)
def test_impossible_shapes(shape: Shape, words: str | None) -> None:
    """A part without requests, copies without length and times without end are refused; large is not impossible."""
    if words is None:
        assert len(shaped(TRACE, shape)) == 5_000_000
        return
    with pytest.raises(ConfigError, match=words):
        shaped(TRACE, shape)


@pytest.mark.parametrize("ending", ENDINGS)
def test_written_and_read_again(tmp_path: Path, ending: str) -> None:
    """What was written reads back equal, names and hashes included."""
    write_trace(tmp_path / f"t{ending}", TRACE)
    assert load_trace(str(tmp_path / f"t{ending}"), seed=0).trace == TRACE
    assert [path.name for path in tmp_path.iterdir()] == [f"t{ending}"]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_times_survive_csv(tmp_path_factory: pytest.TempPathFactory, gaps_s: list[float]) -> None:
    """Every float64 time is written so that it reads back to the same bits."""
    arrival_s = sorted(gaps_s)
    trace = RequestTrace.of([at - arrival_s[0] for at in arrival_s], [1] * len(gaps_s), [1] * len(gaps_s), source="t")
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    write_trace(path, trace)
    assert load_trace(str(path), seed=0).trace == trace


def test_bad_targets(tmp_path: Path) -> None:
    """An unknown ending, a missing folder and a name that CSV cannot hold are refused, and nothing is left behind."""
    with pytest.raises(ConfigError, match="says no format"):
        write_trace(tmp_path / "t.xls", TRACE)
    with pytest.raises(ConfigError, match="No such file"):
        write_trace(tmp_path / "no" / "t.csv", TRACE)
    odd = RequestTrace.of([0], [1], [1], source="t", session=Labels.of(["a,b"]))
    with pytest.raises(ConfigError, match="cannot stand in a CSV"):
        write_trace(tmp_path / "t.csv", odd)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [name for name in FILES if name != "vidur-lengths"])
def test_every_format_converts(tmp_path: Path, name: str) -> None:
    """A file of any format, written as ours, is the same trace."""
    (tmp_path / "a").write_bytes(FILES[name])
    trace = load_trace(str(tmp_path / "a"), seed=0).trace
    for ending in ENDINGS:
        write_trace(tmp_path / f"b{ending}", trace)
        assert load_trace(str(tmp_path / f"b{ending}"), seed=0).trace == trace
