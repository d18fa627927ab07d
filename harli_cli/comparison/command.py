"""What ``harli compare`` does: every policy under every seed, then statistics, checks, files."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harli_cli import __version__
from harli_cli.comparison.checks import judge, read_check
from harli_cli.comparison.measures import GAINS, NAMES, figures
from harli_cli.comparison.statistics import best, row, with_gains
from harli_cli.comparison.workers import run_all
from harli_cli.policy_options import options_of_each
from harli_cli.provenance import provenance
from harli_cli.results import NAMES as RUN_RESULTS
from harli_cli.results import REPORT, prepared, write_results
from harli_cli.run import PreparedRun
from harli_cli.scenario import Stage
from harli_cli.trace_options import load_configured
from harli_core.config import RunConfig
from harli_core.errors import ConfigError
from policies import find_policy
from traces.whole_file import replace_file, replace_text

RESULT = "compare.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared, and how it is judged. ``command`` is how that was asked for.

    ``jobs``: processes, `None` for as many as there are cores for this program.
    """

    config: RunConfig
    policies: Sequence[str]
    seeds: int
    checks: Sequence[str]
    jobs: int | None
    command: str


@dataclass(frozen=True, slots=True)
class Case:
    """One policy under one seed. ``tables`` is a folder for its results, if they are kept, ``drawn`` whether in a report."""

    config: RunConfig
    tables: Path | None
    drawn: bool

    def __str__(self) -> str:
        """As an error names it."""
        return f"policy {self.config.policy}, seed {self.config.seed}"


def compare(asked: Comparison, out: Path, as_html: bool, stage: Stage) -> dict[str, Any]:
    """Run, judge, write ``compare.json`` (and ``report.html``), and the results of each policy under the first seed.

    Returns the document. Raises `HarliError` subclasses.
    """
    config, policies = asked.config, asked.policies
    if len(set(policies)) != len(policies) or not policies:
        raise ConfigError(f"--policies {','.join(policies)}: expected different names, separated by commas")
    checks = [read_check(text, policies) for text in asked.checks]
    factories = {policy: find_policy(policy) for policy in policies}
    options = options_of_each(factories, config.policy_options)
    seeds = tuple(range(config.seed, config.seed + asked.seeds))
    origin = provenance(asked.command)
    loaded = load_configured(config)
    for policy in policies:  # what is wrong with one is said before anything runs
        PreparedRun.of(_config(config, policy, seeds[0], options[policy]), loaded)
    with prepared(out, (RESULT, REPORT)) as folder, tempfile.TemporaryDirectory(prefix="harli-compare-") as scratch:
        cases = list(_cases(asked, options, seeds, Path(scratch), as_html))
        answers = _run(cases, asked.jobs, stage)
        runs = with_gains({(case.config.policy, case.config.seed): found for case, (found, _) in answers})
        rows = [{**row(policy, seeds, runs), "policy_options": options[policy]} for policy in policies]
        means = {one["policy"]: {name: one[name]["mean"] for name in NAMES} for one in rows}
        document = {
            "schema": SCHEMA,
            "harli_version": __version__,
            **origin,
            "config": {
                **config.model_dump(exclude={"policy", "policy_options", "seed"}),
                "trace": Path(config.trace).name,
            },
            "requests": len(loaded.trace),
            "seeds": list(seeds),
            "rows": rows,
            "best_within_target": best(rows),
            "checks": [asdict(judge(check, means)) for check in checks],
        }
        (folder / RESULT).unlink(missing_ok=True)  # it may not stand beside results that it does not tell of
        for policy in policies:
            _keep(Path(scratch) / _folder_name(policy), folder / _folder_name(policy))
        if as_html:
            from harli_cli.report.pages import compare_report  # noqa: PLC0415

            digests = {case.config.policy: digest for case, (_, digest) in answers if digest is not None}
            compare_report(folder / REPORT, document, digests)
        text = json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n"
        replace_text(folder / RESULT, text)
    return document


def _cases(
    asked: Comparison, options: Mapping[str, Mapping[str, Any]], seeds: Sequence[int], scratch: Path, as_html: bool
) -> Iterator[Case]:
    """Every policy that is asked for, and every baseline of a gain, under every seed."""
    baselines = [name for name in GAINS.values() if name not in asked.policies]
    for seed in seeds:
        for policy in asked.policies:
            config = _config(asked.config, policy, seed, options[policy])
            first = seed == seeds[0]
            yield Case(config, scratch / _folder_name(policy) if first else None, first and as_html)
        for policy in baselines:
            yield Case(_config(asked.config, policy, seed, {}), None, False)


def written(out: Path, policies: Sequence[str], as_html: bool) -> list[Path]:
    """The files that `compare` writes."""
    of_policies = [out / _folder_name(policy) / name for policy in policies for name in RUN_RESULTS]
    return [out / RESULT, *([out / REPORT] if as_html else []), *of_policies]


def _folder_name(policy: str) -> str:
    """``module:Class`` without the colon, which some file systems and archives refuse."""
    return policy.replace(":", ".")


def _keep(source: Path, target: Path) -> None:
    """Copy the result files of a run, each whole or not at all, its summary last."""
    with prepared(target):
        for name in sorted(RUN_RESULTS, key=lambda name: name == "summary.json"):
            with (source / name).open("rb") as file:
                replace_file(target / name, partial(shutil.copyfileobj, file))


Found = tuple[dict[str, float | None], dict[str, Any] | None]


def _run(cases: Sequence[Case], jobs: int | None, stage: Stage) -> list[tuple[Case, Found]]:
    """Every case on ``jobs`` processes (`None`: as many as there are cores for this program)."""
    count = 0
    progress = stage("scenarios", len(cases))

    def done(_case: Case) -> None:
        nonlocal count
        count += 1
        progress(count)

    answers = run_all(cases, _work, jobs or len(os.sched_getaffinity(0)), done, lambda case: case.config.policy)
    return list(zip(cases, answers, strict=True))


def _work(case: Case) -> Found:
    """One run in a process of its own: its figures, and what the report draws."""
    finished = PreparedRun.of(case.config).finish(_silent)
    drawn: dict[str, Any] | None = None
    if case.tables is not None:
        case.tables.mkdir()
        write_results(case.tables, finished.summary, finished.requests, finished.steps)
        if case.drawn:
            from harli_cli.report.columns import columns_of  # noqa: PLC0415
            from harli_cli.report.digest import digest  # noqa: PLC0415

            drawn = digest(columns_of(finished.summary, finished.requests, finished.steps))
    return figures(finished.summary), drawn


def _silent(_name: str, _total: int) -> Any:
    return lambda _count: None


def _config(config: RunConfig, policy: str, seed: int, options: Mapping[str, Any]) -> RunConfig:
    return config.model_copy(
        update={
            "policy": policy,
            "seed": seed,
            "policy_options": dict(options),
            "serving_gpus": config.serving_gpus if policy == "separate" else None,
        }
    )


def failed(document: Mapping[str, Any]) -> bool:
    """Whether a check does not hold."""
    return not all(verdict["holds"] for verdict in document["checks"])
