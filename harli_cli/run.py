"""What ``harli run`` does once its options are known."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backends.sim.device_model import DeviceModel
from backends.sim.simulation import SimOutcome
from harli_cli import __version__
from harli_cli.log_file import DecisionLogWriter
from harli_cli.perfetto import PerfettoWriter, SinkPair
from harli_cli.results import discard_summary, prepared, write_results
from harli_cli.scenario import Scenario, Stage
from harli_cli.serving_gpus import fewest_serving
from harli_core.config import RunConfig
from harli_core.errors import AuditError, MemoryAccountingError
from harli_core.records import RequestBook, StepBook
from harli_core.summary import RunFacts, summarise, utilisation
from traces import LoadedTrace

SUMMARY_SCHEMA = 1


def execute(
    config: RunConfig, out: Path, log: Path | None, baselines: bool, stage: Stage, perfetto: Path | None = None
) -> dict[str, Any]:
    """Run, audit, write; returns the summary. Raises `HarliError` subclasses with their exit codes."""
    prepared_run = PreparedRun.of(config)
    with prepared(out) as folder:
        try:
            finished = prepared_run.finish(stage, baselines=baselines, log=log, perfetto=perfetto)
        except (AuditError, MemoryAccountingError):
            discard_summary(folder)
            raise
        write_results(folder, finished.summary, finished.requests, finished.steps)
    return finished.summary


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """An audited run: its summary and its books."""

    summary: dict[str, Any]
    requests: RequestBook
    steps: StepBook


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A scenario whose policy and options were tried, so that what is wrong with them is said before anything runs.

    ``searches``: its policy is ``separate``, and how many GPUs serve is yet to be found.
    """

    scenario: Scenario
    options: Mapping[str, Any]
    searches: bool

    @classmethod
    def of(cls, config: RunConfig, loaded: LoadedTrace | None = None) -> PreparedRun:
        """Load and check; ``loaded`` spares reading the trace again. Raises `HarliError` subclasses."""
        scenario = Scenario(config, loaded)
        options = dict(config.policy_options)
        searches = config.policy == "separate" and config.serving_gpus is None and "serving_gpus" not in options
        if config.policy == "separate":
            options.setdefault("serving_gpus", config.serving_gpus or 1)
        scenario.contexts.policies(config.policy, options)
        return cls(scenario, options, searches)

    def finish(
        self, stage: Stage, *, baselines: bool = False, log: Path | None = None, perfetto: Path | None = None
    ) -> FinishedRun:
        """Simulate and audit; nothing is written but ``log`` and ``perfetto``."""
        scenario, config, options = self.scenario, self.scenario.config, dict(self.options)
        found: tuple[SimOutcome, DeviceModel] | None = None
        if self.searches:
            options["serving_gpus"], outcome, device = fewest_serving(scenario, stage)
            found = outcome, device
        with ExitStack() as opened:
            sinks: list[DecisionLogWriter | PerfettoWriter] = []
            if log is not None:
                header = scenario.contexts.header(config.policy, options)
                sinks.append(opened.enter_context(DecisionLogWriter(log, header)))
            if perfetto is not None:
                sinks.append(opened.enter_context(PerfettoWriter(perfetto)))
            if found is None or sinks:
                sink = SinkPair(*sinks) if len(sinks) > 1 else next(iter(sinks), None)
                progress = stage(config.policy, len(scenario.loaded.trace))
                found = scenario.run(config.policy, options, sink, progress)
            outcome, device = found
            for writer in sinks:
                if isinstance(writer, PerfettoWriter):
                    _add_copies(writer, outcome)
        summary = {
            "schema": SUMMARY_SCHEMA,
            "harli_version": __version__,
            "backend": "sim",
            "config": {**config.model_dump(), "policy_options": options},
            "trace": {
                **scenario.loaded.trace.summary(),
                "format": scenario.loaded.format,
                "repairs": asdict(scenario.loaded.repairs),
            },
            **sections(scenario, outcome, device),
        }
        if baselines:
            summary["baselines"] = _baselines(config, scenario, summary, stage)
        return FinishedRun(summary, outcome.requests, outcome.steps)


def _add_copies(writer: PerfettoWriter, outcome: SimOutcome) -> None:
    for instance, state in enumerate(outcome.instances):
        if state.copies is not None:
            writer.add_copies(instance, state.copies, outcome.duration_s)


def sections(scenario: Scenario, outcome: SimOutcome, device: DeviceModel) -> dict[str, Any]:
    """Everything about a simulated run under the names of the summary."""
    config = scenario.config
    states = outcome.instances
    facts = RunFacts(
        qos_ms=config.qos_ms,
        ttft_slo_ms=config.ttft_slo_ms,
        total_sms=device.capabilities.total_sms,
        gpus=config.gpus,
        duration_s=outcome.duration_s,
        finetune_tokens=sum(state.finetune_tokens for state in states),
        finetune_steps=sum(state.finetune_steps for state in states),
        finetune_gpus=sum(1 for state in states if state.hosts_job),
    )
    found = summarise(outcome.requests, outcome.steps, facts)
    found["utilisation_estimated"] = utilisation(
        outcome.steps, scenario.served, scenario.finetuned, facts.finetune_tokens, scenario.sheet, facts
    )
    found["memory"] = {
        "rows": scenario.geometry.rows,
        "row_tokens": scenario.geometry.row_tokens,
        "row_bytes": scenario.geometry.row_bytes,
        "rows_lent": sum(state.rows_lent for state in states),
        "rows_reclaimed": sum(state.rows_reclaimed for state in states),
        "layers_swapped_in": sum(state.swaps_in for state in states),
        "swapped_bytes": sum(state.swapped_bytes for state in states),
        "finetune_stalled_s": sum(state.stall_s for state in states),
    }
    prefill_s = outcome.duration_s * config.prefill_gpus
    found["prefill_busy"] = outcome.prefill_busy_s / prefill_s if prefill_s else None
    found["device_model"] = {
        "evaluated": dict(sorted(device.evaluated.items())),
        "extrapolated": dict(sorted(device.extrapolated.items())),
    }
    return found


def _baselines(config: RunConfig, scenario: Scenario, summary: dict[str, Any], stage: Stage) -> dict[str, Any]:
    """The same trace and seed under ``inference_only`` and ``separate``: excess violations, and the gain."""
    total = len(scenario.loaded.trace)
    alone, alone_device = scenario.run("inference_only", {}, progress=stage("inference_only", total))
    alone_steps = sections(scenario, alone, alone_device)["steps"]
    if config.serving_gpus is None:
        serving, apart, apart_device = fewest_serving(scenario, stage)
    else:
        serving = config.serving_gpus
        apart, apart_device = scenario.run("separate", {"serving_gpus": serving}, progress=stage("separate", total))
    apart_tokens_per_s = sections(scenario, apart, apart_device)["finetune"]["tokens_per_s"]
    own_tokens_per_s = summary["finetune"]["tokens_per_s"]
    own, other = (sum(section["violations"].values()) for section in (summary["steps"], alone_steps))
    return {
        "separate": {
            "serving_gpus": serving,
            "finetune_tokens_per_s": apart_tokens_per_s,
            "gain": own_tokens_per_s / apart_tokens_per_s - 1.0 if apart_tokens_per_s else None,
        },
        "inference_only": {
            "latency_ms": alone_steps["latency_ms"],
            "violations": alone_steps["violations"],
            "excess_violations": own - other,
        },
    }
