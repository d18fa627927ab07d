"""One run of the command line in a process of its own: its results, and what the operating system counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

NO_BYTE_CODE = "PYTHONDONTWRITEBYTECODE"
"""Where this is set, a checkout is compiled anew by every process, which an installed program is not."""


def fresh_run(arguments: list[str], folder: Path) -> dict[str, float]:
    """``harli run`` into ``folder``, from the start of a process to its end; `SystemExit` with its message if it fails."""
    counted = fresh_process(["run", *arguments, "--out", str(folder)])
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    return {**counted, "requests": summary["requests"]["arrivals"], "steps": summary["steps"]["count"]}


def fresh_process(arguments: list[str]) -> dict[str, float]:
    """What ``harli`` with ``arguments``, and its workers, took; ``peak_mib`` is that of the largest of these processes."""
    command = [sys.executable, "-m", "harli_cli", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != NO_BYTE_CODE}
    started_s = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None, "it was asked for"
    with process.stderr:
        said = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {said}")
    return {"wall_s": wall_s, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_mib": usage.ru_maxrss / 1024}
