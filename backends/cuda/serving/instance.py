"""A serving process put together: partitions, SGLang on the unified pool, a finetuning job beside it."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from backends.cuda.finetune.assembly import build_engine
from backends.cuda.finetune.engine import FinetuneEngine
from backends.cuda.finetune.optimizer_step import UnitSettings
from backends.cuda.finetune.recipe import Recipe
from backends.cuda.serving.decoder import Decoder, Prefill
from backends.cuda.serving.job_memory import JobMemory, needs_of
from backends.cuda.serving.partitions import Partitions, cuda_partitions, host_partitions
from backends.cuda.serving.random_job import random_feed, random_peft_model, served_weights
from backends.cuda.serving.recorder import Recorder
from backends.cuda.serving.scheduler_factory import ServingSettings, make_scheduler
from backends.cuda.serving.serving_loop import Job, LoopLimits, ServingLoop
from backends.cuda.serving.timeline import CudaTimeline, HostTimeline, Timeline
from backends.cuda.serving.unit_pump import UnitPump
from harli_core.decision_log import DecisionSink
from harli_core.errors import ConfigError
from harli_core.loop import DecisionLoop
from harli_core.policy import Policy
from harli_core.predict.predictor import StepPredictor
from harli_core.records import RequestBook, StepBook
from harli_core.requests import RequestSpec

ENDLESS_STEPS = 10_000_000


@dataclass(frozen=True, slots=True)
class JobSettings:
    """A random job: ``config`` is the finetuned model's; with ``shared`` it trains on the served model's own tensors."""

    config: dict[str, Any]
    unit_tokens: int
    micro_batches: int
    rank: int = 16
    shared: bool = False
    window_layers: int | None = None


class Instance:
    """Made once in a process; policies follow one another on it without loading anything again."""

    def __init__(
        self,
        settings: ServingSettings,
        predictor: StepPredictor,
        prefill: Prefill,
        *,
        partitioned: bool = True,
        clock_s: Callable[[], float] = time.perf_counter,
        report: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),  # noqa: T201
    ) -> None:
        """Load and capture; ``partitioned`` of `False` leaves SGLang its one graph set on the whole chip."""
        self.settings = settings
        self.predictor = predictor
        self.startup_s: dict[str, float] = {}
        self._report = report
        self.on_gpu = settings.device == "cuda"
        capabilities = predictor.profile.capabilities
        self.stream: Any = None
        if self.on_gpu:
            import torch

            torch.cuda.init()
            self.stream = torch.cuda.Stream()
        begin_s = time.perf_counter()
        self.partitions: Partitions = (
            cuda_partitions(capabilities.splits, capabilities.total_sms, report)
            if self.on_gpu
            else host_partitions(capabilities.splits, capabilities.total_sms)
        )
        self.startup_s["partitions"] = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        self.timeline: Timeline = CudaTimeline(clock_s) if self.on_gpu else HostTimeline(clock_s)
        with self.on_stream():
            scheduler = make_scheduler(settings, self.partitions if partitioned else None)
            if self.on_gpu:
                scheduler.schedule_stream = self.stream
            self.decoder = Decoder(scheduler, self.timeline, self.stream, prefill)
        self.startup_s["model, memory, graphs"] = time.perf_counter() - begin_s
        report(f"decoder ready after {sum(self.startup_s.values()):.1f} s: {self.startup_s}")
        self.job: Job | None = None
        self.engine: FinetuneEngine | None = None

    def on_stream(self) -> Any:
        """SGLang's work goes to one stream."""
        if not self.on_gpu:
            return nullcontext()
        import torch

        return torch.cuda.stream(self.stream)

    @property
    def vocab(self) -> int:
        """Tokens that the served model knows."""
        return int(self.decoder.scheduler.model_config.vocab_size)

    def settle(self) -> None:
        """After a run that was cut off: send its requests away, let units run out, take nothing along."""
        self.decoder.abort_all()
        job = self.job
        while job is not None and not job.pump.drained():
            pass

    def add_job(self, job: JobSettings) -> None:
        """Build a finetuning job beside the decoder, its window in lent rows; one that is there goes first."""
        import torch

        self.remove_job()

        begin_s = time.perf_counter()
        dtype = self.decoder.scheduler.tp_worker.model_runner.model_config.dtype
        device = self.settings.device
        model = random_peft_model(job.config, job.rank, device, dtype, weights=not job.shared)
        layer_bytes = 0 if job.shared else _layer_bytes(model)
        geometry = self.decoder.memory.allocator.geometry
        layers = job.config["num_hidden_layers"]
        needs = needs_of(layer_bytes, layers, geometry)
        scrub = torch.cuda.Stream().cuda_stream if self.on_gpu else 0
        memory = JobMemory(self.decoder, needs, scrub)
        with self.on_stream():
            if needs.rows_floor >= geometry.rows:
                raise ConfigError(
                    f"finetuning needs {needs.rows_floor} rows of {geometry.row_bytes >> 20} MiB, the pool has "
                    f"{geometry.rows}; raise --memory-gb"
                )
            memory.grow(needs.rows_wanted if needs.rows_wanted < geometry.rows // 2 else needs.rows_floor)
        least = min(2, layers)
        held = memory.rows_held * geometry.row_blocks // needs.layer_blocks if needs.layer_blocks else layers
        window = min(layers, max(least, held))
        shared = served_weights(self.decoder.scheduler, model.config) if job.shared else None
        engine = build_engine(
            model,
            random_feed(job.config["vocab_size"], job.unit_tokens, job.micro_batches),
            Recipe(max_steps=ENDLESS_STEPS, learning_rate=1e-5, lr_scheduler_type="constant"),
            device=device,
            window_layers=None if job.shared else window,
            shared=shared,
            slot_memory=None if job.shared else memory.slot,
            settings=UnitSettings(head_parts=max(1, job.unit_tokens // 1024)),
        )
        memory.attach(engine)
        self.engine = engine
        pump = UnitPump(engine, self.partitions, self.timeline, self._unit_ms)
        self.job = Job("job-0", pump, memory, job.unit_tokens, self._drop_engine)
        self.startup_s["job"] = time.perf_counter() - begin_s
        self._report(
            f"job ready after {self.startup_s['job']:.1f} s, window {engine.state.window_layers} of {layers} layers"
        )

    def remove_job(self) -> None:
        """Give up the job with all that it holds, and wait until its rows are back."""
        job, self.job = self.job, None
        if job is None:
            self.engine = None
            return
        while not job.pump.drained():
            pass
        if not job.released:
            job.pump.stop("removed")
            job.pump.work = None
            job.released = True
            job.memory.release(self.timeline.now_ms(), job.drop)
        while job.memory.under_way:
            job.memory.poll(self.timeline.now_ms())
        job.memory.close()

    def warm_up(self) -> None:
        """Let every graph set and every finetune stream run once, so that nothing is compiled or captured while serving."""
        begin_s = time.perf_counter()
        with self.on_stream():
            for group in range(self.partitions.groups if self.on_gpu else 1):
                for index in range(2):
                    self.decoder.submit(-1 - index, [1] * 32, 3, 0.0)
                while not self.decoder.idle:
                    if not self.decoder.admit(lambda: None):
                        break
                    self.decoder.take_prefilled(0.0)
                    if self.decoder.running and self.decoder.launch(group):
                        while not self.decoder.done():
                            pass
                        self.decoder.finish(0.0)
        if self.engine is not None and self.on_gpu:
            import torch

            for lane in (*self.partitions.lanes, self.partitions.whole):
                target = self.engine.state.step + 1
                while self.engine.state.step < target and (unit := self.engine.next_unit()) is not None:
                    self.engine.run(unit, lane.finetune_stream)
                torch.cuda.synchronize()
        gc.collect()
        gc.freeze()  # what was made so far lives for good; collecting it again and again would delay steps
        self.startup_s["warm-up"] = time.perf_counter() - begin_s
        self._report(f"warm after {self.startup_s['warm-up']:.1f} s")

    def serve(
        self,
        policy: Policy,
        requests: RequestBook,
        arrivals: Iterator[RequestSpec],
        prompt_of: Callable[[RequestSpec], Sequence[int]],
        qos_ms: float,
        limits: LoopLimits,
        sink: DecisionSink | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> tuple[ServingLoop, StepBook]:
        """Make the loop of one run under ``policy``; call its ``run`` inside `on_stream`."""
        loop = DecisionLoop(policy, self.predictor.profile.capabilities, sink)
        steps = StepBook()
        recorder = Recorder(0, loop, requests, steps, self.predictor, qos_ms)
        job = self.job if policy.finetunes else None
        serving = ServingLoop(
            self.decoder,
            self.partitions,
            self.timeline,
            loop,
            recorder,
            arrivals,
            prompt_of,
            limits,
            job,
            progress,
        )
        return serving, steps

    def _unit_ms(self, kind: Any, tokens: int, sms: int) -> float:
        return self.predictor.unit_ms(kind, tokens, sms)

    def _drop_engine(self) -> None:
        self.engine = None
        gc.unfreeze()
        gc.collect()


def _layer_bytes(model: Any) -> int:
    from backends.cuda.finetune.frozen_layer import FrozenLayout
    from backends.cuda.finetune.submodel import CutModel

    return FrozenLayout.of(CutModel(model).layers[0]).size_bytes
