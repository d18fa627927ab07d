"""The one error tree: what was wrong, where, and what would be right."""

from __future__ import annotations


class HarliError(Exception):
    """Anything that a user can cause and mend; its text is one line, shown without a traceback."""

    exit_code = 2


class ConfigError(HarliError):
    """An option, a configuration file or an argument that cannot be used."""


class TraceError(HarliError):
    """A request trace that breaks its format; names the file, the row and the field."""


class SampleError(HarliError):
    """Measured samples or a fitted profile that are incomplete or malformed."""


class PlanError(HarliError):
    """A policy answered with a plan that the hardware or the memory cannot carry out."""


class PolicyError(HarliError):
    """A policy failed: an exception in its constructor, `plan` or `observe`, or an answer that is no plan."""

    exit_code = 4


class WorkerError(HarliError):
    """A process that ran one scenario of a comparison died (killed, or out of memory)."""

    exit_code = 3


class JobError(HarliError):
    """A finetuning job that cannot be run or go on: its file, its data, its model or its loss."""


class LogError(HarliError):
    """A decision log that cannot be read or was written under another schema."""


class BackendUnavailableError(HarliError):
    """The backend cannot run here; says what is missing and how to get it."""


class MemoryAccountingError(HarliError):
    """A request to the memory bookkeeping that its state does not allow (a double free, say)."""

    exit_code = 3


class OutOfMemoryError(MemoryAccountingError):
    """No room for an allocation; every table is as it was."""


class DriverCallError(HarliError):
    """A call to the driver of a GPU failed; what had been done before it is undone."""

    exit_code = 3


class AuditError(HarliError):
    """The run finished, but its own books do not balance: a fault of the program, not of the user."""

    exit_code = 3
