"""Where a result comes from: the command, the commit of the code, the machine."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

CODE = ("harli_core", "backends", "policies", "traces", "harli_cli")
"""What a commit must have unchanged to stand for a result, below the root of a checkout."""


def provenance(command: str, code: Sequence[str] = CODE) -> dict[str, object]:
    """Command, commit (`None` where unknown) and machine, as result files have them."""
    return {"command": command, "commit": commit(code), "machine": machine()}


def machine() -> dict[str, object]:
    """Processor, cores and Python."""
    return {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()}


def commit(code: Sequence[str] = CODE) -> str | None:
    """The commit that this code is checked out at, ``+`` behind it where ``code`` (pathspecs) was changed since.

    `None` where the code is installed rather than checked out, even if that is below a checkout of something else.
    """
    here = Path(__file__).resolve()
    root = here.parents[1]
    if _git(root, "ls-files", "--error-unmatch", "--", str(here)) is None:
        return None
    head = _git(root, "rev-parse", "HEAD")
    return head and head + ("+" if _git(root, "status", "--porcelain", "--", *code) else "")


def typed_command(arguments: Sequence[str], path: str) -> str:
    """``harli`` and its arguments as a shell would take them, with only the name of the file at ``path``."""
    name = Path(path).name
    shortened = [name if one == path else one.replace(f"={path}", f"={name}") for one in arguments]
    return shlex.join(["harli", *shortened])


def _git(root: Path, *arguments: str) -> str | None:
    """What git says, `None` where it fails or is not there."""
    try:
        found = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)  # noqa: S603, S607
    except OSError:
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
