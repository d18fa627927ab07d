"""The installed program as a process of its own: few starts, what only a process can show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def harli(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run in ``folder``, so that the installed package is found and not a checkout."""
    return subprocess.run(
        [sys.executable, "-m", "harli_cli", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        timeout=120,
        check=False,
    )


def test_bad_input_ends_the_process_cleanly(tmp_path: Path, trace: Path) -> None:
    """Exit code 2, one line, no traceback."""
    done = harli(tmp_path, "run", "--trace", trace.name, "--gpus", "x")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"harli: ")
    assert done.stderr.count(b"\n") == 1


def test_hash_seed_changes_nothing(tmp_path: Path, trace: Path) -> None:
    """Two processes, two hash seeds: the same bytes in summary, decision log, tables and on the terminal."""
    outcomes = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        (folder / trace.name).write_bytes(trace.read_bytes())
        done = harli(
            folder, "run", "--trace", trace.name, "--log", "log.jsonl", PYTHONHASHSEED=seed, PYTHONIOENCODING="ascii"
        )
        assert (done.returncode, done.stderr) == (0, b"")
        files = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
        outcomes.append((done.stdout, (folder / "log.jsonl").read_bytes(), files))
    assert outcomes[0] == outcomes[1]


def test_no_bytes_meant_for_a_terminal(tmp_path: Path, trace: Path) -> None:
    """With output to a pipe: nothing on standard error, no escape sequence or carriage return on standard output."""
    done = harli(tmp_path, "run", "--trace", trace.name)
    assert (done.returncode, done.stderr) == (0, b"")
    assert not re.search(rb"[\x1b\r]", done.stdout)


def test_policy_of_the_readme(tmp_path: Path, trace: Path) -> None:
    """Each example in README.md runs as it stands there, from the working directory."""
    examples = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", README.read_text("utf-8"), flags=re.DOTALL)
    names = re.findall(r"--policy (\w+:\w+)", README.read_text("utf-8"))
    assert [name.partition(":")[0] for name in names] == [module for module, _ in examples]
    for (module, text), name in zip(examples, names, strict=True):
        (tmp_path / f"{module}.py").write_text(text)
        done = harli(tmp_path, "run", "--trace", trace.name, "--policy", name, "--log", "log.jsonl")
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"finetune throughput" in done.stdout
