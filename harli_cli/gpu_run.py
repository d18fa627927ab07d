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

from backends.cuda.finetune.job_file import JobFile, read_job
from harli_cli import __version__
from harli_cli.log_file import DecisionLogWriter
from harli_cli.results import discard_summary, prepared, write_results
from harli_cli.run import SUMMARY_SCHEMA
from harli_cli.scenario import Scenario, Stage, TraceSource
from harli_core.config import RunConfig
from harli_core.errors import AuditError, ConfigError, MemoryAccountingError
from harli_core.predict.predictor import StepPredictor
from harli_core.records import RequestBook, StepBook
from harli_core.requests import RequestSpec
from harli_core.summary import RunFacts, distribution, summarise, utilisation

if TYPE_CHECKING:
    from backends.cuda.serving.hosted_job import JobOutcome
    from backends.cuda.serving.instance import Instance
    from backends.cuda.serving.serving_loop import ServingLoop

LOAD_FORMATS = ("auto", "dummy")
PREFILLS = ("elsewhere", "local")
DEVICES = ("cuda", "cpu")


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """What only this backend takes."""

    model_path: Path | None
    load_format: str
    prefill: Literal["elsewhere", "local"]
    job: JobFile | None = None
    device: Literal["cuda", "cpu"] = "cuda"

    @classmethod
    def checked(
        cls,
        config: RunConfig,
        model_path: Path | None,
        load_format: str,
        prefill: str,
        *,
        baselines: bool,
        finetune_job: Path | None = None,
        device: str = "cuda",
    ) -> GpuOptions:
        """Raise `ConfigError` for what one GPU cannot do, or for options that contradict each other."""
        if load_format not in LOAD_FORMATS:
            raise ConfigError(f"--load-format {load_format!r}: expected auto or dummy")
        if prefill not in PREFILLS:
            raise ConfigError(f"--prefill {prefill!r}: expected elsewhere or local")
        if device not in DEVICES:
            raise ConfigError(f"--device {device!r}: expected cuda or cpu")
        if config.gpus != 1:
            raise ConfigError(f"gpus = {config.gpus}: --backend cuda drives one GPU a process; start one for each GPU")
        if baselines:
            raise ConfigError(
                "--baselines is for the simulator: on a GPU run the policies inference_only and separate themselves"
            )
        if config.samples is not None:
            raise ConfigError(
                f"samples = {config.samples!r}: they make a simulated GPU; for --backend cuda fit a profile to them "
                "('harli fit') and give it with --profile"
            )
        if (model_path is None) is (load_format == "auto"):
            raise ConfigError(
                "--backend cuda needs a model: --model-path FOLDER, or --load-format dummy for random weights shaped like "
                f"{config.model}" + ("" if model_path is None else " (not both)")
            )
        job = None if finetune_job is None else read_job(finetune_job)
        if job is not None and config.share_weights:
            _check_shared(job, model_path)
        return cls(
            model_path,
            load_format,
            "local" if prefill == "local" else "elsewhere",
            job,
            "cpu" if device == "cpu" else "cuda",
        )


def _check_shared(job: JobFile, model_path: Path | None) -> None:
    """Raise `ConfigError` unless the job's model is the served one, in the served precision."""
    if model_path is None or model_path.resolve() != Path(job.model_name_or_path).resolve():
        raise ConfigError(
            f"--share-weights: the job trains {job.model_name_or_path}, and {model_path or 'random weights'} "
            "would be served; share one folder, or leave --share-weights out"
        )
    if not job.bf16:
        raise ConfigError("--share-weights: the served weights are bf16; the job needs bf16 = true")


def execute_on_gpu(config: RunConfig, options: GpuOptions, out: Path, log: Path | None, stage: Stage) -> dict[str, Any]:
    """Run, audit, write; returns the summary.

    SIGTERM or SIGINT ends the run once what has arrived is served; a finetuning job is checkpointed then. A second
    one ends it at once.
    """
    from backends.cuda.requirements import require_serving  # noqa: PLC0415

    scenario = Scenario(config)
    policy = scenario.contexts.policies(config.policy, dict(config.policy_options))[0]
    if options.job is not None and not policy.finetunes:
        raise ConfigError(f"--finetune-job: the policy {config.policy!r} does not finetune")
    require_serving(options.device)
    if options.device == "cuda":
        from backends.cuda.serving.scheduler_factory import graph_sizes  # noqa: PLC0415

        scenario.on_graphs(graph_sizes(config.max_batch))
    with prepared(out) as folder, tempfile.TemporaryDirectory() as scratch:
        instance = _instance(config, options, scenario, Path(scratch))
        return run_and_write(instance, config, options, scenario, folder, log, stage)


def _instance(config: RunConfig, options: GpuOptions, scenario: Scenario, scratch: Path) -> Instance:
    from backends.cuda.serving.instance import Instance  # noqa: PLC0415
    from backends.cuda.serving.job_source import JobSettings  # noqa: PLC0415
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
        device=options.device,
        load_format=options.load_format,
        dtype="bfloat16",
        kv=KvSettings(lending=config.lending),
        seed=config.seed,
    )
    instance = Instance(settings, StepPredictor(scenario.profile), options.prefill)
    if options.job is not None:
        instance.add_job_file(options.job, shared=config.share_weights)
    elif scenario.contexts.policies(config.policy, dict(config.policy_options))[0].finetunes:
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


def run_and_write(
    instance: Instance,
    config: RunConfig,
    options: GpuOptions,
    scenario: Scenario,
    out: Path,
    log: Path | None,
    stage: Stage,
) -> dict[str, Any]:
    """`run_on` with its results in ``out``; returns the summary."""
    try:
        summary, book, steps = run_on(instance, config, options, scenario, log, stage)
    except (AuditError, MemoryAccountingError):
        discard_summary(out)
        raise
    write_results(out, summary, book, steps)
    return summary


def run_on(
    instance: Instance, config: RunConfig, options: GpuOptions, scenario: Scenario, log: Path | None, stage: Stage
) -> tuple[dict[str, Any], RequestBook, StepBook]:
    """Serve the scenario's trace on ``instance`` and audit it; returns the summary and the books."""
    from backends.cuda.serving.serving_loop import LoopLimits  # noqa: PLC0415

    trace = scenario.loaded.trace
    policy_options = dict(config.policy_options)
    policy = scenario.contexts.policies(config.policy, policy_options)[0]
    book = RequestBook(trace.prompt_tokens, trace.output_tokens)
    sink = DecisionLogWriter(log, scenario.contexts.header(config.policy, policy_options)) if log is not None else None
    prompt = prompts(instance.vocab, int(trace.prompt_tokens.max()), config.seed)
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
        outcome = instance.job_outcome() if policy.finetunes else None
    summary = {
        "schema": SUMMARY_SCHEMA,
        "harli_version": __version__,
        "backend": "cuda",
        "config": {**config.model_dump(), "policy_options": policy_options},
        "trace": {**trace.summary(), "format": scenario.loaded.format, "repairs": asdict(scenario.loaded.repairs)},
        **sections(instance, serving, config, options, scenario, book, steps, duration_s, outcome),
    }
    return summary, book, steps


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
    """SIGTERM and SIGINT let ``serving`` drain while this lasts; a second one does what it did before."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number in numbers:
            signal.signal(number, before[number])

    def drain(_number: int, _frame: object) -> None:
        restore()
        serving.drain()

    for number in numbers:
        signal.signal(number, drain)
    try:
        yield
    finally:
        restore()


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
    outcome: JobOutcome | None,
) -> dict[str, Any]:
    """Everything measured, under the names that a simulation uses."""
    job = serving.job
    progress = job.pump.progress if job is not None else []
    tokens = progress[-1][1] - progress[0][1] if progress else 0
    facts = RunFacts(
        qos_ms=config.qos_ms,
        ttft_slo_ms=config.ttft_slo_ms,
        total_sms=instance.partitions.total_sms,
        gpus=1,
        duration_s=duration_s,
        finetune_tokens=tokens,
        finetune_steps=max(0, len(progress) - 1),
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
    ended = outcome is not None and outcome.ending in ("failed", "refused")
    found["finetune"]["stopped"] = outcome.reason if outcome is not None and ended else None
    found["finetune"]["job"] = None if outcome is None else asdict(outcome)
    found["gpu"] = {
        "partitions": instance.partitions.kind,
        "prefill": options.prefill,
        "startup_s": instance.startup_s,
        "began_s": serving.zero_s,
        "decide_ms": distribution(np.asarray(serving.decide_ms)) if serving.decide_ms else None,
        "launch_ms": distribution(np.asarray(serving.launch_delay_ms)) if serving.launch_delay_ms else None,
    }
    return found
