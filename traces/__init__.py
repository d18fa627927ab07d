"""Request traces: one strict loader a public format, one schema, seeded generators. `load_trace` is the way in."""

from traces.registry import FORMATS, SYNTHETIC, TraceFormat, load_trace
from traces.schema import LoadedTrace, Repairs, RequestTrace

__all__ = ["FORMATS", "SYNTHETIC", "LoadedTrace", "Repairs", "RequestTrace", "TraceFormat", "load_trace"]
