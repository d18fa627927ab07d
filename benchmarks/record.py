"""What every result file says about where it comes from, and how it is written."""

from __future__ import annotations

import json
import os
from pathlib import Path

from harli_cli.provenance import CODE
from harli_cli.provenance import provenance as provenance_of
from traces.whole_file import replace_text

ROOT = Path(__file__).resolve().parents[1]

TRACES = {
    "azure-conv": "traces/azure/AzureLLMInferenceTrace_conv.csv",
    "azure-code": "traces/azure/AzureLLMInferenceTrace_code.csv",
    "mooncake": "traces/mooncake/conversation_trace.jsonl",
}
"""The public traces that benchmarks replay, below the folder that HARLI_SHARED names."""


def results_folder(script: str) -> Path:
    """Where results of the benchmark at ``script`` (its ``__file__``) go: HARLI_RESULTS, or ``results`` beside it."""
    return Path(os.environ.get("HARLI_RESULTS", Path(script).parent / "results"))


def write_json(path: Path, document: object, *, indent: int | None = 1, sort_keys: bool = True) -> None:
    """Replace ``path`` in one step; equal documents give equal bytes, also in another order where keys are sorted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(document, indent=indent, sort_keys=sort_keys) + "\n")


def provenance(command: str) -> dict[str, object]:
    """Machine, Python, commit (``+`` where code was changed since) and the command that made a result."""
    return provenance_of(command, (*CODE, "benchmarks", ":!benchmarks/*/results/*"))


def azure_conv() -> Path:
    """The Azure 2023 conversation trace on this machine; ends the program with a hint where there is none."""
    return public_trace("azure-conv")


def public_trace(name: str) -> Path:
    """One of `TRACES` on this machine; ends the program with a hint where it is not."""
    setting = os.environ.get("HARLI_SHARED")
    if setting and (path := Path(setting).resolve() / TRACES[name]).is_file():
        return path
    raise SystemExit(f"{name}: set HARLI_SHARED to a folder that holds {TRACES[name]}")
