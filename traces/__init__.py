"""Request traces: one strict loader a public format, one schema, seeded generators. `load_trace` is the way in."""

from traces.registry import FORMATS, SYNTHETIC, TraceFormat, load_trace
from traces.schema import LoadedTrace, RepairOptions, Repairs, RequestTrace
from traces.shaping import Shape, shaped

__all__ = [
    "FORMATS",
    "SYNTHETIC",
    "LoadedTrace",
    "RepairOptions",
    "Repairs",
    "RequestTrace",
    "Shape",
    "TraceFormat",
    "load_trace",
    "shaped",
]
