"""What ``harli replay`` does: feed a decision log to a policy again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harli_cli.log_file import read_log
from harli_cli.scenario import PolicyContexts
from harli_core.decision_log import Divergence, decode_records, replay


def replay_log(
    path: Path, policy: str | None, changed: Mapping[str, Any] | None = None
) -> tuple[str, int, Divergence | None]:
    """Replay ``path`` with its own policy or another; returns the policy's name, records compared, first divergence.

    The log's policy options hold for its own policy only; ``changed`` are set on top.
    """
    header, lines = read_log(path)
    contexts = PolicyContexts.from_header(header, str(path))
    name = policy if policy is not None else str(header.get("policy"))
    logged: dict[str, Any] = header.get("policy_options", {}) if policy is None else {}
    made = contexts.policies(name, {**logged, **(changed or {})})
    compared, divergence = replay(decode_records(lines, str(path)), dict(enumerate(made)))
    return name, compared, divergence


def divergence_fields(divergence: Divergence) -> dict[str, Any]:
    """A divergence with everything named, for JSON."""
    return asdict(divergence)


def difference_lines(divergence: Divergence) -> list[str]:
    """A divergence to read: where it is, then one line for each field of the plan that differs."""
    view = divergence.view
    where = f"instance {view.instance}, step {view.step}, {view.time_s:.6f} s, batch {view.batch}"
    lines = [f"record {divergence.record} ({where}, {view.kv_tokens:,} KV tokens) differs:"]
    logged, planned = (dict(_leaves("", asdict(plan))) for plan in (divergence.logged, divergence.planned))
    for name in dict.fromkeys((*logged, *planned)):
        ours, theirs = planned.get(name, "nothing"), logged.get(name, "nothing")
        if ours != theirs:
            lines.append(f"  {name}: logged {theirs}, planned {ours}")
    return lines


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The plain values in nested fields, named as in ``jobs[0].sms``."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}" if name else key, item)
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _leaves(f"{name}[{index}]", item)
    else:
        yield name, value
