"""No command writes over a file that it reads, over another of its own, or over what is no file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.cli.conftest import Harli


@pytest.mark.parametrize(
    "arguments",
    [
        ("--log", "{trace}"),
        ("--perfetto", "{trace}"),
        ("--perfetto", "c.toml", "--config", "c.toml"),
        ("--log", "out/summary.json"),
        ("--perfetto", "same.json", "--log", "same.json"),
        ("--perfetto", "out/report.html", "--html"),
        ("--log", "link"),
    ],
)
def test_a_file_in_use(arguments: tuple[str, ...], harli: Harli, trace: Path, tmp_path: Path) -> None:
    """Refused with the option and the file before anything runs; every file is as it was."""
    Path("c.toml").write_text("gpus = 1\n")
    Path("link").symlink_to(trace)
    before = trace.read_bytes()
    ended = harli("run", "--trace", trace, *(argument.format(trace=trace) for argument in arguments))
    assert ended.code == 2
    assert ended.err.startswith(f"harli: {arguments[0]} ")
    assert "is in use already; give it a name of its own" in ended.err
    assert not Path("out").exists()
    assert trace.read_bytes() == before
    assert Path("c.toml").read_text() == "gpus = 1\n"


def test_a_trace_named_like_a_result(harli: Harli, trace: Path, tmp_path: Path) -> None:
    """The results would take its place."""
    (tmp_path / "summary.json").write_bytes(trace.read_bytes())
    ended = harli("run", "--trace", tmp_path / "summary.json", "--out", tmp_path)
    assert (ended.code, (tmp_path / "summary.json").read_bytes()) == (2, trace.read_bytes())
    assert "summary.json is in use already" in ended.err


@pytest.mark.parametrize("name", ["compare.json", "report.html", "harli/summary.json"])
@pytest.mark.parametrize("option", ["--trace", "--samples"])
def test_compare_writes_over_nothing_it_reads(
    option: str, name: str, harli: Harli, trace: Path, tmp_path: Path
) -> None:
    """Results of a comparison, of its policies too, do not take the place of its trace or samples."""
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(trace.read_bytes())
    given = {"--trace": trace, option: file}
    run = ("compare", *(part for pair in given.items() for part in pair), "--policies", "harli", "--seeds", 1)
    ended = harli(*map(str, run), "--out", tmp_path / "out")
    assert (ended.code, file.read_bytes()) == (2, trace.read_bytes())
    assert f"{file} is in use already" in ended.err


def test_a_link_is_followed(harli: Harli, trace: Path, tmp_path: Path) -> None:
    """What it points to is written; it stays a link."""
    (tmp_path / "elsewhere").mkdir()
    Path("log.jsonl").symlink_to(tmp_path / "elsewhere" / "log.jsonl")
    assert harli("run", "--trace", trace, "--log", "log.jsonl").code == 0
    assert Path("log.jsonl").is_symlink()
    assert (tmp_path / "elsewhere" / "log.jsonl").stat().st_size > 0


@pytest.mark.parametrize("option", ["--log", "--perfetto"])
def test_a_pipe_is_never_replaced(option: str, harli: Harli, trace: Path) -> None:
    """Nor a device: both are refused."""
    os.mkfifo("pipe")
    ended = harli("run", "--trace", trace, option, "pipe")
    assert (ended.code, stat.S_ISFIFO(Path("pipe").stat().st_mode)) == (2, True)
    assert "it is a device or a pipe; expected the name of a file" in ended.err


def test_a_generated_trace_replaces_no_pipe(harli: Harli) -> None:
    """The same for traces."""
    os.mkfifo("pipe.csv")
    ended = harli("trace", "generate", "poisson", "--rate", "2", "--duration", "5", "--out", "pipe.csv")
    assert (ended.code, stat.S_ISFIFO(Path("pipe.csv").stat().st_mode)) == (2, True)
    assert "it is a device or a pipe" in ended.err


@pytest.mark.parametrize("name", ["summary.json", "steps.parquet"])
def test_a_folder_in_the_place_of_a_result(name: str, harli: Harli, trace: Path) -> None:
    """Said before the run; nothing else is written."""
    Path("out", name).mkdir(parents=True)
    ended = harli("run", "--trace", trace)
    assert ended.code == 2
    assert f"cannot write {name} there (it is a folder" in ended.err
    assert [path.name for path in Path("out").iterdir()] == [name]
