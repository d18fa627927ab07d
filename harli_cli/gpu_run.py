"""``harli run --backend cuda``: the same arguments and results as a simulation, in real time on this machine's GPU."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from harli_cli import __version__
from harli_cli.log_file import DecisionLogWriter
from harli_cli.results import discard_summary, prepared, write_results
from harli_cli.run import SUMMARY_SCHEMA, check_log
from harli_cli.scenario import Scenario, Stage, TraceSource
from harli_core.config import RunConfig
from harli_core.errors import AuditError, ConfigError, MemoryAccountingError
from harli_core.predict.predictor import StepPredictor
from harli_core.records import RequestBook, StepBook
from harli_core.requests import RequestSpec
from harli_core.summary import RunFacts, distribution, summarise, utilisation

if TYPE_CHECKING:
    from backends.cuda.serving.instance import Instance
    from backends.cuda.serving.serving_loop import ServingLoop

LOAD_FORMATS = ("auto", "dummy")
PREFILLS = ("elsewhere", "local")


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """What only this backend takes."""

    model_path: Path | None
    load_format: str
    prefill: Literal["elsewhere", "local"]

    @classmethod
    def checked(
        cls, config: RunConfig, model_path: Path | None, load_format: str, prefill: str, *, baselines: bool
    ) -> GpuOptions:
        """Raise `ConfigError` for what one GPU cannot do, or for options that contradict each other."""
        if load_format not in LOAD_FORMATS:
            raise ConfigError(f"--load-format {load_format!r}: expected auto or dummy")
        if prefill not in PREFILLS:
            raise ConfigError(f"--prefill {prefill!r}: expected elsewhere or local")
        if config.gpus != 1:
            raise ConfigError(f"gpus = {config.gpus}: --backend cuda drives one GPU a process; start one for each GPU")
        if baselines:
            raise ConfigError(
                "--baselines is for the simulator: on a GPU run the policies inference_only and separate themselves"
            )
        if (model_path is None) is (load_format == "auto"):
            raise ConfigError(
                "--backend cuda needs a model: --model-path FOLDER, or --load-format dummy for random weights shaped like "
                f"{config.model}" + ("" if model_path is None else " (not both)")
            )
        return cls(model_path, load_format, "local" if prefill == "local" else "elsewhere")


def execute_on_gpu(config: RunConfig, options: GpuOptions, out: Path, log: Path | None, stage: Stage) -> dict[str, Any]:
    """Run, audit, write; returns the summary. SIGTERM ends the run once what has arrived is served."""
    from backends.cuda.requirements import require  # noqa: PLC0415

    if log is not None:
        check_log(log, out, config)
    scenario = Scenario(config)
    scenario.contexts.policies(config.policy, dict(config.policy_options))
    require()
    with prepared(out) as folder, tempfile.TemporaryDirectory() as scratch:
        instance = _instance(config, options, scenario, Path(scratch))
        return _run_and_write(instance, config, options, scenario, folder, log, stage)


def _instance(config: RunConfig, options: GpuOptions, scenario: Scenario, scratch: Path) -> Instance:
    from backends.cuda.serving.instance import Instance, JobSettings  # noqa: PLC0415
    from backends.cuda.serving.kv_pool import KvSettings  # noqa: PLC0415
    from backends.cuda.serving.model_folder import check_folder, dummy_folder, shipped_config  # noqa: PLC0415
    from backends.cuda.serving.scheduler_factory import ServingSettings  # noqa: PLC0415

    trace = scenario.loaded.trace
    longest = int(np.max(trace.prompt_tokens + trace.output_tokens)) + 16
    if options.model_path is None:
        folder = dummy_folder(shipped_config(config.model), longest, scratch)
    else:
        folder = check_folder(options.model_path)
    settings = ServingSettings(
        folder,
        scenario.geometry.capacity_tokens,
        config.max_batch,
        longest,
        load_format=options.load_format,
        dtype="bfloat16",
        kv=KvSettings(lending=config.lending),
        seed=config.seed,
    )
    instance = Instance(settings, StepPredictor(scenario.profile), options.prefill)
    if scenario.contexts.policies(config.policy, dict(config.policy_options))[0].finetunes:
        instance.add_job(
            JobSettings(
                shipped_config(config.finetuned),
                config.micro_batch_tokens,
                config.gradient_accumulation_steps,
                rank=config.lora_rank,
                shared=config.share_weights,
            )
        )
    instance.warm_up()
    return instance


def _run_and_write(
    instance: Instance,
    config: RunConfig,
    options: GpuOptions,
    scenario: Scenario,
    out: Path,
    log: Path | None,
    stage: Stage,
) -> dict[str, Any]:
    from backends.cuda.serving.serving_loop import LoopLimits  # noqa: PLC0415

    trace = scenario.loaded.trace
    policy_options = dict(config.policy_options)
    policy = scenario.contexts.policies(config.policy, policy_options)[0]
    book = RequestBook(trace.prompt_tokens, trace.output_tokens)
    sink = DecisionLogWriter(log, scenario.contexts.header(config.policy, policy_options)) if log is not None else None
    prompt = prompts(instance.vocab, int(trace.prompt_tokens.max()), config.seed)
    try:
        with sink or nullcontext():
            serving, steps = instance.serve(
                policy,
                book,
                TraceSource(trace).requests(),
                prompt,
                config.qos_ms,
                LoopLimits(config.max_batch, config.horizon_s),
                sink,
                stage(config.policy, len(trace)),
            )
            with instance.on_stream(), terminated_by(serving):
                duration_s = serving.run()
            audit(serving, book, steps)
    except (AuditError, MemoryAccountingError):
        discard_summary(out)
        raise
    summary = {
        "schema": SUMMARY_SCHEMA,
        "harli_version": __version__,
        "backend": "cuda",
        "config": {**config.model_dump(), "policy_options": policy_options},
        "trace": {**trace.summary(), "format": scenario.loaded.format, "repairs": asdict(scenario.loaded.repairs)},
        **sections(instance, serving, config, options, scenario, book, steps, duration_s),
    }
    write_results(out, summary, book, steps)
    return summary


class prompts:  # noqa: N801  (called like a function)
    """Token ids for a trace that has only their number: the same random ones for every request."""

    def __init__(self, vocab: int, longest: int, seed: int) -> None:
        """Draw them once."""
        self._ids: list[int] = np.random.default_rng(seed).integers(3, vocab, longest).tolist()

    def __call__(self, spec: RequestSpec) -> Sequence[int]:
        """The first ``prompt_tokens`` of them."""
        return self._ids[: spec.prompt_tokens]


@contextmanager
def terminated_by(serving: ServingLoop) -> Iterator[None]:
    """SIGTERM lets ``serving`` drain while this lasts."""
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: serving.drain())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def audit(serving: ServingLoop, book: RequestBook, steps: StepBook) -> None:
    """Tokens that steps and prefill emitted are the requests' tokens, and memory adds up; raises `AuditError`."""
    serving.check_integrity()
    emitted = int(np.dot(steps.span_column("batch"), steps.span_steps())) if len(steps) else 0
    produced = int(book.produced_tokens.sum())
    if emitted + serving.prefilled_tokens != produced:
        raise AuditError(
            f"audit: steps emitted {emitted} tokens and prefill {serving.prefilled_tokens}, requests count {produced}"
        )


def sections(
    instance: Instance,
    serving: ServingLoop,
    config: RunConfig,
    options: GpuOptions,
    scenario: Scenario,
    book: RequestBook,
    steps: StepBook,
    duration_s: float,
) -> dict[str, Any]:
    """Everything measured, under the names that a simulation uses."""
    job = serving.job
    state = instance.engine.state if instance.engine is not None and job is not None else None
    tokens = 0
    optimizer_steps = 0
    if job is not None and job.pump.progress:
        tokens = job.pump.progress[-1][1] - job.pump.progress[0][1]
        optimizer_steps = tokens // (config.micro_batch_tokens * config.gradient_accumulation_steps)
    facts = RunFacts(
        qos_ms=config.qos_ms,
        ttft_slo_ms=config.ttft_slo_ms,
        total_sms=instance.partitions.total_sms,
        gpus=1,
        duration_s=duration_s,
        finetune_tokens=tokens,
        finetune_steps=optimizer_steps,
        finetune_gpus=0 if job is None else 1,
    )
    found = summarise(book, steps, facts)
    found["utilisation_estimated"] = utilisation(
        steps, scenario.served, scenario.finetuned, tokens, scenario.sheet, facts
    )
    geometry = instance.decoder.memory.allocator.geometry
    memory = job.memory if job is not None else None
    found["memory"] = {
        "rows": geometry.rows,
        "row_tokens": geometry.row_tokens,
        "row_bytes": geometry.row_bytes,
        "rows_lent": memory.lent_total if memory is not None else 0,
        "rows_reclaimed": memory.reclaimed_total if memory is not None else 0,
        "reclaim_ms": distribution(np.asarray(memory.reclaim_ms)) if memory is not None and memory.reclaim_ms else None,
    }
    found["finetune"]["stopped"] = job.pump.failure if job is not None else None
    found["finetune"]["loss"] = state.loss if state is not None else None
    found["gpu"] = {
        "partitions": instance.partitions.kind,
        "prefill": options.prefill,
        "startup_s": instance.startup_s,
        "decide_ms": distribution(np.asarray(serving.decide_ms)) if serving.decide_ms else None,
        "launch_ms": distribution(np.asarray(serving.launch_delay_ms)) if serving.launch_delay_ms else None,
    }
    return found
