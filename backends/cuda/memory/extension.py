"""Whether the C++ extension is there, and what to do where it is not."""

from __future__ import annotations

from importlib.util import find_spec

from harli_core.errors import BackendUnavailableError

HOW_TO_BUILD = (
    "build it with: HARLI_CUDA=1 pip install . (needs CUDA headers), or HARLI_NATIVE=host pip install . (no CUDA)"
)


def missing() -> str | None:
    """What is missing and what to do, or `None` if the extension is installed."""
    if find_spec("backends.cuda._native") is None:
        return f"the C++ extension backends.cuda._native is not installed; {HOW_TO_BUILD}"
    return None


def require() -> None:
    """Raise `BackendUnavailableError` where the extension is missing."""
    lacking = missing()
    if lacking is not None:
        raise BackendUnavailableError(lacking)
