"""The decision log: one line of JSON a record, one schema for both backends.

The first line is a header (schema version, policy, context, provenance); every other line holds one view, the plan that
answered it and the results that followed, exactly: a float survives the round trip bit by bit, so `replay` can feed
a log to a policy again and see the same plans.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, cast

from harli_core.errors import LogError
from harli_core.policy import Policy
from harli_core.policy_calls import ask, tell
from harli_core.types import Hold, JobPlan, JobView, MemoryView, StepPlan, StepResult, StepView

SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One turn of the loop: a result for each batch that decoded under the plan, none if it was dropped at once."""

    view: StepView
    plan: StepPlan
    results: tuple[StepResult, ...]


class DecisionSink(Protocol):
    """Where records go."""

    def write(self, record: DecisionRecord) -> None:
        """Keep one record."""
        ...


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first record (1 = the line after the header) for which a policy planned otherwise than the log says."""

    record: int
    view: StepView
    logged: StepPlan
    planned: StepPlan


def encode_header(header: Mapping[str, Any]) -> str:
    """The first line of a log: ``header`` plus the schema version."""
    return json.dumps({"schema": "harli-decision-log", "version": SCHEMA_VERSION, **header}, sort_keys=True)


def decode_header(line: str, source: str) -> dict[str, Any]:
    """Read and check the first line; `LogError` names ``source`` and what is wrong."""
    try:
        header = json.loads(line)
    except json.JSONDecodeError as error:
        raise LogError(f"{source}: line 1 is not JSON ({error.msg}); a decision log begins with a header") from None
    if not isinstance(header, dict) or header.get("schema") != "harli-decision-log":
        raise LogError(f"{source}: line 1 is not the header of a decision log")
    if header.get("version") != SCHEMA_VERSION:
        raise LogError(f"{source}: schema version {header.get('version')}, this program reads {SCHEMA_VERSION}")
    return cast("dict[str, Any]", header)


def _is_tuple(value: Any) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(value, tuple)


def _fields(value: Any) -> Any:
    """A value as nested lists in field order (names stand once in the schema, not in every line)."""
    if _is_tuple(value):
        return [_fields(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return [_fields(getattr(value, name)) for name in value.__dataclass_fields__]
    return value


def _result_fields(result: StepResult) -> list[Any]:
    """Without ``unit_ratio`` where there is none, as logs were before there was one."""
    fields: list[Any] = _fields(result)
    return fields[:-1] if result.unit_ratio is None else fields


def encode_record(record: DecisionRecord) -> str:
    """One line, without its newline: ``[view, plan, results]``, each as its fields in the order of `harli_core.types`."""
    results = [_result_fields(result) for result in record.results]
    return json.dumps([_fields(record.view), _fields(record.plan), results], separators=(",", ":"))


def decode_record(line: str, source: str, number: int) -> DecisionRecord:
    """The inverse of `encode_record`; `LogError` names ``source`` and the line."""
    try:
        view, plan, results = json.loads(line)
        *view_head, memory, jobs = view
        decode_sms, job_plans, hold, predicted_ms = plan
        view_fields: list[Any] = [*view_head, MemoryView(*memory), tuple(JobView(*job) for job in jobs)]
        return DecisionRecord(
            StepView(*view_fields),
            StepPlan(decode_sms, tuple(JobPlan(*job) for job in job_plans), _hold(*hold), predicted_ms),
            tuple(_result(*result) for result in results),
        )
    except (ValueError, TypeError) as error:
        raise LogError(f"{source}: line {number} is not a record of schema {SCHEMA_VERSION} ({error})") from None


def _hold(steps: int, max_step_ms: float | None, batches: list[int] | None, most_kv_tokens: int | None) -> Hold:
    if batches is None:
        return Hold(steps, max_step_ms, None, most_kv_tokens)
    least, most = batches
    return Hold(steps, max_step_ms, (least, most), most_kv_tokens)


def _result(
    instance: int,
    first_step: int,
    batch: int,
    kv_tokens: int,
    latency_ms: list[float],
    decode_ms: list[float],
    turn_ms: list[float],
    idle_s: float,
    unit_ratio: float | None = None,
) -> StepResult:
    columns = (tuple(latency_ms), tuple(decode_ms), tuple(turn_ms))
    return StepResult(instance, first_step, batch, kv_tokens, *columns, idle_s, unit_ratio)


def decode_records(lines: Iterable[str], source: str) -> Iterator[DecisionRecord]:
    """The records of a log whose header was already taken off ``lines``."""
    for number, line in enumerate(lines, start=2):
        yield decode_record(line, source, number)


def replay(records: Iterable[DecisionRecord], policies: Mapping[int, Policy]) -> tuple[int, Divergence | None]:
    """Plan, compare, then `observe` the logged results, record by record; ``policies`` maps instance to policy.

    Returns the number of records compared and the first divergence. Stops there: later views follow from other plans.
    Raises `PolicyError` where a policy fails.
    """
    compared = 0
    for record in records:
        policy = policies.get(record.view.instance)
        if policy is None:
            raise LogError(
                f"record {compared + 1} is of instance {record.view.instance}, the header knows {len(policies)}"
            )
        planned = ask(policy, record.view)
        compared += 1
        if planned != record.plan:
            return compared, Divergence(compared, record.view, record.plan, planned)
        for result in record.results:
            tell(policy, record.view, result)
    return compared, None
