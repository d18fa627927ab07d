"""From a `RunConfig` to a finished simulated run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from backends.sim.device_model import DeviceModel
from backends.sim.simulation import SimOutcome, SimSettings, Simulation
from harli_cli.package_data import shipped_profile, shipped_samples
from harli_cli.policy_options import check_options
from harli_cli.profiling import read_profile, read_samples
from harli_cli.trace_options import load_configured
from harli_core.config import RunConfig
from harli_core.decision_log import DecisionSink
from harli_core.errors import ConfigError, HarliError, PolicyError
from harli_core.hardware import gpu_sheet
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.reservation import Reservation
from harli_core.model import model_shape
from harli_core.policy import Policy, PolicyContext
from harli_core.policy_calls import fault_text
from harli_core.predict.predictor import StepPredictor
from harli_core.predict.profile import Profile
from harli_core.predict.samples import Samples
from harli_core.requests import RequestSpec
from harli_core.working_set import JobShape
from policies import find_policy
from traces import LoadedTrace, RequestTrace

ADMISSION_TOKENS = 8192
"""Prompt tokens that one admission is expected to bring at most (reservation)."""

Stage = Callable[[str, int], Callable[[int], None]]
"""Announces a simulation by name and number of requests; gives back what to call with the number done."""

PAPER_QOS_MS = 50.0
"""The step length in the paper's reservation formula."""


POLICY_MEMBERS = ("serves", "finetunes", "plan", "observe")
"""What every policy has (`harli_core.policy.Policy`)."""


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A trace as a `RequestSource`."""

    trace: RequestTrace

    def requests(self) -> Iterator[RequestSpec]:
        """The trace's requests in order."""
        columns = (self.trace.arrival_s, self.trace.prompt_tokens, self.trace.output_tokens)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for index, (arrival_s, prompt_tokens, output_tokens) in enumerate(rows):
            yield RequestSpec(index, arrival_s, prompt_tokens, output_tokens)


@dataclass(frozen=True, slots=True)
class PolicyContexts:
    """What every instance's policy is made from; also what a decision log must carry to be replayed."""

    gpus: int
    qos_ms: float
    profile: Profile
    reservation: Reservation

    def policies(self, name: str, options: Mapping[str, Any]) -> list[Policy]:
        """One policy object an instance.

        Raises `ConfigError` for an unknown policy or option, `PolicyError` for an exception in its constructor.
        """
        factory = find_policy(name)
        predictor = StepPredictor(self.profile)
        contexts = [
            PolicyContext(instance, self.gpus, self.qos_ms, self.profile.capabilities, predictor, self.reservation)
            for instance in range(self.gpus)
        ]
        check_options(name, factory, options)
        made: list[Policy] = []
        for context in contexts:
            try:
                made.append(factory(context, **options))
            except HarliError:
                raise
            except Exception as error:
                fault = fault_text(error, getattr(factory, "__module__", ""))
                raise PolicyError(
                    f"policy {name!r} failed in its constructor for instance {context.instance}: {fault}"
                ) from error
        lacking = [member for member in POLICY_MEMBERS if not hasattr(made[0], member)]
        if lacking:
            raise ConfigError(f"policy {name!r} is no policy: it has no {', '.join(lacking)}")
        return made

    def header(self, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """The context as a decision log's header."""
        return {
            "policy": name,
            "policy_options": dict(options),
            "gpus": self.gpus,
            "qos_ms": self.qos_ms,
            "profile": self.profile.to_dict(),
            "reservation": asdict(self.reservation),
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any], source: str) -> PolicyContexts:
        """The inverse of `header`; `ConfigError` where a part is missing."""
        try:
            profile = Profile.from_dict(header["profile"], source)
            gpus, qos_ms = int(header["gpus"]), float(header["qos_ms"])
            return cls(gpus, qos_ms, profile, Reservation(**header["reservation"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{source}: the header lacks a part of the policy's context ({error})") from None


def _samples(config: RunConfig) -> Samples:
    """The shipped samples, or those in a file; raises `ConfigError` where these are of another served model."""
    if config.samples is None:
        return shipped_samples(config.gpu, config.model)
    samples = read_samples(Path(config.samples))
    if samples.device is None or samples.device.model != config.model:
        measured = "no model named" if samples.device is None else samples.device.model
        raise ConfigError(f"{config.samples}: samples of {measured}, not of {config.model}")
    if not samples.prefill:
        raise ConfigError(f"{config.samples}: no prefill samples in it; 'harli profile' measures them too")
    return samples


def _profile(config: RunConfig, samples: Samples) -> Profile:
    """The shipped profile, the one in a file, or one fitted to the user's samples.

    Raises `ConfigError` where it is of another pair of models.
    """
    if config.profile is None and config.samples is not None:
        from harli_core.predict.fit import fit_profile  # noqa: PLC0415

        return fit_profile(samples, config.finetuned)
    if config.profile is None:
        return shipped_profile(config.gpu, config.model, config.finetuned)
    profile = read_profile(Path(config.profile))
    if (profile.model, profile.finetune_model) != (config.model, config.finetuned):
        raise ConfigError(
            f"{config.profile}: a profile of {profile.finetune_model} beside {profile.model}, "
            f"not of {config.finetuned} beside {config.model}"
        )
    return profile


class Scenario:
    """A trace on some hardware, loaded once; run it under as many policies as you like."""

    def __init__(self, config: RunConfig, loaded: LoadedTrace | None = None) -> None:
        """Load and check everything that can be wrong before the first step; ``loaded`` spares reading the trace again."""
        self.config = config
        self.served = model_shape(config.model)
        self.finetuned = model_shape(config.finetuned)
        self.sheet = gpu_sheet(config.gpu)
        self.samples = _samples(config)
        self.profile = _profile(config, self.samples)
        self.geometry = self._geometry()
        self.contexts = PolicyContexts(config.gpus, config.qos_ms, self.profile, self._reservation())
        find_policy(config.policy)
        self.loaded = loaded or load_configured(config)

    def on_graphs(self, graph_batches: Sequence[int]) -> None:
        """The GPU at hand runs decode graphs of these sizes, whatever the profile was measured with."""
        self.profile = replace(self.profile, graph_batches=tuple(graph_batches))
        self.contexts = replace(self.contexts, profile=self.profile)

    def run(
        self,
        policy: str,
        options: Mapping[str, Any],
        sink: DecisionSink | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> tuple[SimOutcome, DeviceModel]:
        """Simulate the trace under ``policy``; returns the books, and the device model for its counters.

        Raises `ConfigError` where profile and samples are of GPUs that are divided in different ways.
        """
        config = self.config
        self._check_partitions()
        device = DeviceModel(self.samples, config.finetuned, config.micro_batch_tokens, config.seed)
        trace = self.loaded.trace
        simulation = Simulation(
            source=TraceSource(trace),
            prompt_tokens=trace.prompt_tokens,
            output_tokens=trace.output_tokens,
            policies=self.contexts.policies(policy, options),
            device=device,
            geometry=self.geometry,
            reservation=self.contexts.reservation,
            job_shape=JobShape(
                job_id="job-0",
                model=self.finetuned,
                unit_tokens=config.micro_batch_tokens,
                micro_batches=config.gradient_accumulation_steps,
                lora_rank=config.lora_rank,
                shares_weights=config.share_weights,
            ),
            settings=SimSettings(
                qos_ms=config.qos_ms,
                prefill_gpus=config.prefill_gpus,
                max_batch=config.max_batch,
                router=config.router,
                lending=config.lending,
                horizon_s=config.horizon_s,
                exact_steps=config.exact_steps,
            ),
            sink=sink,
            progress=progress,
        )
        return simulation.run(), device

    def _check_partitions(self) -> None:
        """A policy asks for partitions of the profile; the simulated GPU has those of the samples."""
        profile, device = self.profile, self.samples.device
        if device is not None and (profile.total_sms, profile.splits) != (device.total_sms, device.splits):
            raise ConfigError(
                f"{self.config.profile}: a profile of {profile.total_sms} SMs in {len(profile.splits)} splits, and samples "
                f"of {device.total_sms} SMs in {len(device.splits)} ({self.config.samples or 'those that ship'}); "
                "give --samples and --profile of the same GPU"
            )

    def _geometry(self) -> GridGeometry:
        config = self.config
        memory_bytes = self.sheet.memory_bytes if config.memory_gb is None else int(config.memory_gb * 1e9)
        pool_bytes = memory_bytes - self.served.weight_bytes - int(config.runtime_gb * 1e9)
        if pool_bytes <= 0:
            raise ConfigError(
                f"memory_gb = {memory_bytes / 1e9:g} leaves nothing for KV: {config.model} weighs "
                f"{self.served.weight_bytes / 1e9:.1f} GB and {config.runtime_gb:g} GB are kept for the runtime"
            )
        return GridGeometry.of(self.served, pool_bytes)

    def _reservation(self) -> Reservation:
        """Reclaiming waits for the running unit at most: the longest one beside decode, on the smallest partition."""
        config, row_tokens = self.config, self.geometry.row_tokens
        predictor = StepPredictor(self.profile)
        longest_unit_ms = max(
            predictor.unit_beside_ms(kind, config.micro_batch_tokens, index)
            for kind in ("forward", "backward", "head_loss")
            for index in range(len(self.profile.splits))
        )
        if config.reservation == "paper":
            return Reservation.paper(row_tokens, longest_unit_ms, config.max_batch, PAPER_QOS_MS)
        shortest_ms = predictor.predict(1, 1).whole_chip_ms
        return Reservation.measured(row_tokens, longest_unit_ms, shortest_ms, ADMISSION_TOKENS)
