"""The command line: the only place that wires core, policies, traces and backends together."""

__version__ = "0.1.0"
