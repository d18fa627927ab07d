"""The Azure 2023 format read by name, whatever the header says."""

from __future__ import annotations

from pathlib import Path

from traces.content import TraceContent
from traces.registry import FORMATS, load_trace, read_trace
from traces.schema import RepairOptions, Repairs, RequestTrace

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def load_azure(path: str | Path, *, sort: bool = False) -> tuple[RequestTrace, Repairs]:
    """Read a file as Azure 2023."""
    loaded = load_trace(str(path), seed=0, repairs=RepairOptions(sort=sort), format_name="azure-2023")
    return loaded.trace, loaded.repairs


def parse_azure(content: TraceContent) -> tuple[RequestTrace, Repairs]:
    """Read bytes as Azure 2023."""
    return read_trace(content, FORMATS["azure-2023"])
