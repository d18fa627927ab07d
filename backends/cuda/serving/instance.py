"""A serving process put together: partitions, SGLang on the unified pool, a finetuning job beside it."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from backends.cuda.finetune.engine import FinetuneEngine
from backends.cuda.finetune.job_file import JobFile
from backends.cuda.serving import sglang_version
from backends.cuda.serving.beside_units import BesideUnits
from backends.cuda.serving.decode_warm_up import warm_up_decoder
from backends.cuda.serving.decoder import Decoder, Prefill
from backends.cuda.serving.host_stalls import HostStalls, keep_memory_for
from backends.cuda.serving.hosted_job import Job, JobOutcome, describe
from backends.cuda.serving.job_host import host_job
from backends.cuda.serving.job_source import FileJob, JobSettings, JobSource, RandomJob
from backends.cuda.serving.job_warm_up import warm_up_job
from backends.cuda.serving.partitions import Partitions, cuda_partitions, host_partitions
from backends.cuda.serving.recorder import Recorder
from backends.cuda.serving.scheduler_factory import ServingSettings, make_scheduler
from backends.cuda.serving.serving_loop import LoopLimits, ServingLoop
from backends.cuda.serving.timeline import CudaTimeline, HostTimeline, Timeline
from harli_core.decision_log import DecisionSink
from harli_core.errors import HarliError
from harli_core.loop import DecisionLoop
from harli_core.policy import Policy
from harli_core.predict.predictor import StepPredictor
from harli_core.records import RequestBook, StepBook
from harli_core.requests import RequestSpec


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

            sglang_version.prepare(settings.device)  # what it sets of the driver counts from the first CUDA context on
            torch.cuda.init()
            self.stream = torch.cuda.Stream()
        self.stalls = HostStalls(on_gpu=self.on_gpu)
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
        self.refused: str | None = None

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

    @property
    def engine(self) -> FinetuneEngine | None:
        """The job's engine, while there is one."""
        return self.job.engine if self.job is not None else None

    def add_job(self, job: JobSettings) -> None:
        """Build a random finetuning job beside the decoder, its window in lent rows; one that is there goes first."""
        dtype = self.decoder.scheduler.tp_worker.model_runner.model_config.dtype
        self._host(lambda: RandomJob(job, self.settings.device, dtype))

    def add_job_file(self, job: JobFile, *, shared: bool = False) -> None:
        """The same for a job file; ``shared``: it trains on the served model's tensors, which must be its own model's.

        Where the job cannot begin, `refused` says why, and serving goes on without it.
        """
        from backends.cuda.finetune.job import load

        self.refused = None
        try:
            self._host(lambda: FileJob(load(job, self.settings.device), shared=shared))
        except Exception as error:  # whatever it is, serving goes on
            self.refused = str(error) if isinstance(error, HarliError) else describe(error)
            self._report(f"the finetuning job was refused, serving goes on without it: {self.refused}")

    def _host(self, source: Callable[[], JobSource]) -> None:
        self.remove_job()
        begin_s = time.perf_counter()
        self.job = host_job(source(), self.decoder, self.partitions, self.timeline, self.predictor.unit_ms)
        self.startup_s["job"] = time.perf_counter() - begin_s
        state = self.job.engine.state if self.job.engine is not None else None
        if state is not None:
            self._report(
                f"job ready after {self.startup_s['job']:.1f} s, window {state.window_layers} of {state.layers} layers"
            )

    def job_outcome(self) -> JobOutcome | None:
        """What became of the job, saved if it is not over; `None` where there was none."""
        if self.refused is not None:
            return JobOutcome("refused", self.refused)
        if self.job is None:
            return None
        with self.on_stream():
            self.job.save()
        return self.job.outcome()

    def remove_job(self) -> None:
        """Give up the job with all that it holds, and wait until its rows are back."""
        job, self.job = self.job, None
        if job is None:
            return
        while not job.pump.drained():
            pass
        if not job.released:
            job.pump.stop("removed")
            job.release(self.timeline.now_ms())
        while job.memory.under_way:
            job.memory.poll(self.timeline.now_ms())
        job.memory.close()
        job.sweep()

    def warm_up(self) -> None:
        """Let every graph set and every finetune stream run once, so that nothing is compiled or captured while serving."""
        begin_s = time.perf_counter()
        with self.on_stream():
            warm_up_decoder(self.decoder, self.partitions.groups if self.on_gpu else 1)
        if self.job is not None and self.on_gpu:
            import torch

            lanes = (*self.partitions.lanes, self.partitions.whole)
            with self.on_stream():
                self.job.memory.grow(self.job.memory.needs.rows_wanted)
            warm_up_job(self.job, lanes, torch.cuda.synchronize, torch.cuda.empty_cache)
        if self.decoder.stream is not None:
            keep_memory_for(self.decoder.stream)  # what the first steps left is gone with the job's first passes
        gc.collect()
        gc.freeze()  # what was made so far lives for good; collecting it again and again would delay steps
        self.startup_s["warm-up"] = time.perf_counter() - begin_s
        self._report(f"warm after {self.startup_s['warm-up']:.1f} s")

    def _take_rows_back(self, job: Job) -> None:
        """A job that stands still keeps no more than its smallest window."""
        with self.on_stream():
            job.memory.shrink(0, self.timeline.now_ms())
            while job.memory.under_way:
                job.memory.poll(self.timeline.now_ms())

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
        job = self.job if policy.finetunes else None
        if job is None and self.job is not None:
            self._take_rows_back(self.job)
        beside = None if job is None else BesideUnits(job.pump.times, self.predictor, job.unit_tokens)
        recorder = Recorder(0, loop, requests, steps, self.predictor, qos_ms, beside)
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
