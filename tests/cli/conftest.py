"""The command line in this process, and small traces to feed it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from harli_cli.main import main

TRACE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:15:51.2224670,879,55"
)
REQUESTS, OUTPUT_TOKENS = 3, 208


@dataclass(frozen=True, slots=True)
class Answer:
    """What one command left behind."""

    code: int
    out: str
    err: str

    def error(self) -> str:
        """The message of a refused command: exit code 2 and one line on standard error, nothing on the other."""
        assert self.code == 2, self
        assert self.out == ""
        assert self.err.startswith("harli: ")
        assert self.err.count("\n") == 1
        assert self.err.endswith("\n")
        return self.err


Harli = Callable[..., Answer]


@pytest.fixture
def harli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Harli:
    """Run the command line as a process of its own would, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*arguments: str | Path) -> Answer:
        monkeypatch.setattr(sys, "argv", ["harli", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Answer(ended.value.code, captured.out, captured.err)

    return call


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three requests of the Azure 2023 conversation trace, byte for byte in its format."""
    path = tmp_path / "three.csv"
    path.write_bytes(TRACE.encode())
    return path
