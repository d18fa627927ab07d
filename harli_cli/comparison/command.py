"""What ``harli compare`` does: every policy under every seed, then statistics, checks, files."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harli_cli import __version__
from harli_cli.comparison.checks import judge, read_check
from harli_cli.comparison.measures import GAINS, NAMES, figures
from harli_cli.comparison.statistics import best, row, with_gains
from harli_cli.comparison.workers import run_all
from harli_cli.results import prepared, replace_file
from harli_cli.run import execute
from harli_cli.scenario import Scenario, Stage
from harli_core.config import RunConfig
from harli_core.errors import ConfigError

RESULT = "compare.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Case:
    """One policy under one seed; ``scratch`` is a folder for its tables, ``drawn`` whether figures are wanted of it."""

    config: RunConfig
    scratch: Path
    drawn: bool

    def __str__(self) -> str:
        """As an error names it."""
        return f"policy {self.config.policy}, seed {self.config.seed}"


def compare(
    config: RunConfig,
    policies: Sequence[str],
    seeds: int,
    jobs: int | None,
    checks: Sequence[str],
    out: Path,
    as_html: bool,
    stage: Stage,
) -> dict[str, Any]:
    """Run, judge, write ``compare.json`` (and ``report.html``); returns the document. Raises `HarliError` subclasses."""
    if len(set(policies)) != len(policies) or not policies:
        raise ConfigError(f"--policies {','.join(policies)}: expected different names, separated by commas")
    read = [read_check(text, policies) for text in checks]
    for policy in policies:  # what is wrong with one is said before anything runs
        chosen = config.model_copy(update={"policy": policy})
        options = {"serving_gpus": config.serving_gpus or 1} if policy == "separate" else {}
        Scenario(chosen).contexts.policies(policy, options)
    every_seed = tuple(range(config.seed, config.seed + seeds))
    asked = (*policies, *(name for name in GAINS.values() if name not in policies))
    with prepared(out) as folder, tempfile.TemporaryDirectory(prefix="harli-compare-") as scratch:
        cases = [
            Case(_config(config, policy, seed), Path(scratch), as_html and seed == every_seed[0] and policy in policies)
            for seed in every_seed
            for policy in asked
        ]
        answers = _run(cases, jobs, stage)
        runs = with_gains({(case.config.policy, case.config.seed): found for case, (found, _) in answers})
        rows = [row(policy, every_seed, runs) for policy in policies]
        means = {one["policy"]: {name: one[name]["mean"] for name in NAMES} for one in rows}
        document = {
            "schema": SCHEMA,
            "harli_version": __version__,
            "config": config.model_dump(exclude={"policy", "policy_options", "seed"}),
            "seeds": list(every_seed),
            "rows": rows,
            "best_within_target": best(rows),
            "checks": [asdict(judge(check, means)) for check in read],
        }
        if as_html:
            from harli_cli.report.pages import REPORT, compare_report  # noqa: PLC0415

            digests = {case.config.policy: digest for case, (_, digest) in answers if digest is not None}
            compare_report(folder / REPORT, document, digests)
        text = json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n"
        replace_file(folder / RESULT, lambda file: file.write(text.encode()))
    return document


Found = tuple[dict[str, float | None], dict[str, Any] | None]


def _run(cases: Sequence[Case], jobs: int | None, stage: Stage) -> list[tuple[Case, Found]]:
    """Every case on ``jobs`` processes (`None`: as many as there are cores for this program)."""
    count = 0
    progress = stage("scenarios", len(cases))

    def done(_case: Case) -> None:
        nonlocal count
        count += 1
        progress(count)

    answers = run_all(cases, _work, jobs or len(os.sched_getaffinity(0)), done)
    return list(zip(cases, answers, strict=True))


def _work(case: Case) -> Found:
    """One run in a process of its own: its figures, and what the report draws."""
    folder = case.scratch / f"{case.config.seed}-{os.getpid()}"
    summary = execute(case.config, folder, None, False, _silent)
    drawn: dict[str, Any] | None = None
    if case.drawn:
        from harli_cli.report.columns import read_result  # noqa: PLC0415
        from harli_cli.report.digest import digest  # noqa: PLC0415

        drawn = digest(read_result(folder))
    return figures(summary), drawn


def _silent(_name: str, _total: int) -> Any:
    return lambda _count: None


def _config(config: RunConfig, policy: str, seed: int) -> RunConfig:
    return config.model_copy(
        update={
            "policy": policy,
            "seed": seed,
            "policy_options": {},
            "serving_gpus": config.serving_gpus if policy == "separate" else None,
        }
    )


def failed(document: Mapping[str, Any]) -> bool:
    """Whether a check does not hold."""
    return not all(verdict["holds"] for verdict in document["checks"])
