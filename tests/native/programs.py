"""Programs that run in a process of their own: they may die, hang or fork."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def outcome(program: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run ``program`` on the installed packages; raises `subprocess.TimeoutExpired` if it hangs."""
    return subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def passes(program: str, timeout_s: float = 60) -> None:
    """Assert that ``program`` ends well, within ``timeout_s``, and writes no word of complaint."""
    done = outcome(program, timeout_s)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
