"""One simulated run, from requests to books: builds the parts, lets SimPy run them, audits what they did."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import simpy
from numpy.typing import NDArray

from backends.sim.counting_allocator import CountingAllocator
from backends.sim.decode_instance import PINNED_TOKENS, DecodeInstance, InstanceLimits
from backends.sim.device_model import DeviceModel
from backends.sim.finetune_job import FinetuneJob
from backends.sim.job_memory import JobMemory
from backends.sim.layer_swaps import LayerCopies, LayerSwaps
from backends.sim.pcie_link import PcieLink
from backends.sim.prefill_stage import PrefillStage
from backends.sim.request import SimRequest
from backends.sim.router import Router, RouterName
from harli_core.decision_log import DecisionSink
from harli_core.errors import AuditError, ConfigError
from harli_core.loop import DecisionLoop
from harli_core.memory.counting_provider import CountingProvider
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.reservation import Reservation
from harli_core.memory.window import LayerWindow
from harli_core.policy import Policy
from harli_core.records import COMPLETED, REJECTED, RequestBook, StepBook
from harli_core.requests import RequestSource, RequestSpec
from harli_core.working_set import JobShape, WorkingSet

PCIE_BYTES_PER_MS = 50.0e6
"""Pinned memory, one direction, as measured (50 GB/s)."""

REMAP_BLOCK_MS = 0.047
"""What unmap, map and set-access of one 2 MiB block cost together, as measured."""


@dataclass(frozen=True, slots=True)
class SimSettings:
    """Everything about a run that is neither a policy nor a device.

    ``horizon_s`` ends the run early (`None`: when every request is done). ``prefill_gpus`` of 0 sends requests straight
    to decode, their prompts' KV taken as arrived. ``exact_steps`` gives every step an event of its own; the results are
    the same.
    """

    qos_ms: float
    prefill_gpus: int
    max_batch: int
    router: RouterName
    lending: Literal["alias", "remap"]
    horizon_s: float | None
    exact_steps: bool = False


@dataclass(frozen=True, slots=True)
class InstanceState:
    """What the audit and the summary want to know of an instance after the run, and which layers were copied when.

    Without a job it has no ``copies``.
    """

    unfinished: int
    used_tokens: int
    hosts_job: bool
    finetune_steps: int
    finetune_tokens: int
    stall_s: float
    swaps_in: int
    swapped_bytes: int
    rows_lent: int
    rows_reclaimed: int
    copies: LayerCopies | None


@dataclass(frozen=True, slots=True)
class SimOutcome:
    """The books of a finished run."""

    requests: RequestBook
    steps: StepBook
    instances: tuple[InstanceState, ...]
    duration_s: float
    prefill_busy_s: float


class Simulation:
    """``len(policies)`` decode instances, each with its policy, on one device model."""

    def __init__(
        self,
        source: RequestSource,
        prompt_tokens: NDArray[np.int64],
        output_tokens: NDArray[np.int64],
        policies: Sequence[Policy],
        device: DeviceModel,
        geometry: GridGeometry,
        reservation: Reservation,
        job_shape: JobShape,
        settings: SimSettings,
        sink: DecisionSink | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """``progress`` is told the number of requests that are done; at least one policy must serve."""
        self._env = simpy.Environment()
        self._source = source
        self._device = device
        self._geometry = geometry
        self._settings = settings
        self._progress = progress
        self._requests = RequestBook(prompt_tokens, output_tokens)
        self._steps = StepBook()
        self._outstanding = len(self._requests)
        self._all_done = self._env.event()
        self._instances = [
            self._instance(index, policy, reservation, job_shape, sink) for index, policy in enumerate(policies)
        ]
        self._serving = [instance for instance, policy in zip(self._instances, policies, strict=True) if policy.serves]
        if not self._serving:
            raise ConfigError("no instance serves requests under this policy")
        self._roomiest = max(self._serving, key=lambda instance: instance.capacity_tokens)
        self._router = Router(self._serving, settings.router)
        self._prefill: PrefillStage | None = None
        if settings.prefill_gpus:
            self._prefill = PrefillStage(self._env, settings.prefill_gpus, device.prefill_ms, self._prefilled)
        self._env.process(self._arrivals())

    def run(self) -> SimOutcome:
        """Run to the end (or the horizon), settle what is open, audit; raises `AuditError` if the books disagree."""
        horizon_s = self._settings.horizon_s
        if horizon_s is None:
            self._env.run(self._all_done)
        else:
            self._env.run(self._all_done | self._env.timeout(horizon_s * 1000.0))
        end_ms = self._env.now
        for instance in self._instances:
            instance.finish(end_ms)
        outcome = SimOutcome(
            requests=self._requests,
            steps=self._steps,
            instances=tuple(self._state(instance) for instance in self._instances),
            duration_s=end_ms / 1000.0,
            prefill_busy_s=self._prefill.busy_ms / 1000.0 if self._prefill is not None else 0.0,
        )
        self._audit(outcome)
        return outcome

    def _instance(
        self, index: int, policy: Policy, reservation: Reservation, job_shape: JobShape, sink: DecisionSink | None
    ) -> DecodeInstance:
        remap_row_ms = REMAP_BLOCK_MS * self._geometry.row_blocks if self._settings.lending == "remap" else 0.0
        provider = CountingProvider(aliasing=self._settings.lending == "alias", remap_row_ms=remap_row_ms)
        allocator = CountingAllocator(self._geometry, provider, PINNED_TOKENS)
        job: FinetuneJob | None = None
        memory: JobMemory | None = None
        if policy.finetunes:
            needs = WorkingSet.of(job_shape, self._geometry)
            if needs.rows_floor >= self._geometry.rows:
                raise ConfigError(
                    f"finetuning {job_shape.model.name} needs {needs.rows_floor} rows of "
                    f"{self._geometry.row_bytes >> 20} MiB, the pool has {self._geometry.rows}; raise --memory-gb"
                )
            swapped_bytes = 0 if job_shape.shares_weights else job_shape.model.layer_bytes
            window = LayerWindow(needs.layers, needs.minimum_layers)
            swaps = LayerSwaps(window, PcieLink(PCIE_BYTES_PER_MS), swapped_bytes)
            job = FinetuneJob(job_shape, self._device.unit_ms, swaps)
            memory = JobMemory(allocator, needs, job, remap_row_ms)
        return DecodeInstance(
            env=self._env,
            index=index,
            device=self._device,
            loop=DecisionLoop(policy, self._device.capabilities, sink),
            allocator=allocator,
            reservation=reservation,
            job=job,
            job_memory=memory,
            limits=InstanceLimits(self._settings.max_batch, self._settings.qos_ms, self._settings.exact_steps),
            requests=self._requests,
            steps=self._steps,
            preempted=self._again,
            finished=self._done,
        )

    def _arrivals(self) -> Generator[simpy.Event, None, None]:
        for spec in self._source.requests():
            delay_ms = spec.arrival_s * 1000.0 - self._env.now
            if delay_ms > 0.0:
                yield self._env.timeout(delay_ms)
            self._arrive(spec)

    def _arrive(self, spec: RequestSpec) -> None:
        self._requests.arrival_s[spec.index] = spec.arrival_s
        request = SimRequest.of(spec)
        needed, capacity = request.longest_tokens, self._roomiest.capacity_tokens
        if needed <= capacity:
            self._again(request)
        else:
            reason = f"prompt and output need more token slots than a decode instance has ({capacity})"
            self._requests.reject(spec.index, reason)
            self._done(request)

    def _again(self, request: SimRequest) -> None:
        """Compute the request's context: at its arrival, and again after a preemption."""
        if self._prefill is None:
            self._decode(request)
        else:
            self._prefill.submit(request)

    def _prefilled(self, request: SimRequest) -> None:
        if request.last_token_ms is None:
            index = request.spec.index
            request.last_token_ms = self._env.now
            request.remaining -= 1
            self._requests.first_token_s[index] = self._env.now / 1000.0
            self._requests.produced_tokens[index] = 1
            if request.remaining == 0:
                self._requests.complete(index, self._env.now / 1000.0)
                self._done(request)
                return
        self._decode(request)

    def _decode(self, request: SimRequest) -> None:
        instance = self._serving[self._router.pick()]
        fits = request.longest_tokens <= instance.capacity_tokens
        (instance if fits else self._roomiest).submit(request)

    def _done(self, _request: SimRequest) -> None:
        self._outstanding -= 1
        if self._progress is not None:
            self._progress(len(self._requests) - self._outstanding)
        if self._outstanding == 0:
            self._all_done.succeed()

    def _state(self, instance: DecodeInstance) -> InstanceState:
        job, memory = instance.job, instance.memory
        return InstanceState(
            unfinished=instance.unfinished,
            used_tokens=instance.allocator.view().used_tokens,
            hosts_job=job is not None,
            finetune_steps=job.cursor.steps if job is not None else 0,
            finetune_tokens=job.tokens_done if job is not None else 0,
            stall_s=job.stall_ms / 1000.0 if job is not None else 0.0,
            swaps_in=job.swaps.swaps_in if job is not None else 0,
            swapped_bytes=job.swaps.swapped_bytes if job is not None else 0,
            rows_lent=memory.lent_total if memory is not None else 0,
            rows_reclaimed=memory.reclaimed_total if memory is not None else 0,
            copies=job.swaps.copies if job is not None else None,
        )

    def _audit(self, outcome: SimOutcome) -> None:
        """Arrivals = completed + rejected + unfinished, tokens produced = tokens asked, every block free or owned."""
        book = outcome.requests
        for instance in self._instances:
            instance.check_integrity()
        done = book.state == COMPLETED
        if not np.array_equal(book.produced_tokens[done], book.output_tokens[done]):
            raise AuditError("audit: a completed request did not produce the tokens that it asked for")
        if self._settings.horizon_s is None:
            open_requests = int((book.state == 0).sum())
            if open_requests:
                raise AuditError(f"audit: {open_requests} requests were neither completed nor rejected")
        rejected = int((book.state == REJECTED).sum())
        if rejected != len(book.reasons):
            raise AuditError(f"audit: {rejected} requests rejected, {len(book.reasons)} reasons given")
        emitted = int(np.dot(outcome.steps.span_column("batch"), outcome.steps.span_steps()))
        by_prefill = int(np.isfinite(book.first_token_s).sum()) if self._prefill is not None else 0
        if emitted + by_prefill != int(book.produced_tokens.sum()):
            raise AuditError(
                f"audit: steps emitted {emitted} tokens and prefill {by_prefill}, "
                f"requests count {int(book.produced_tokens.sum())}"
            )
