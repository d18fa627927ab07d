"""What crosses the seam between the decision core and a backend.

A backend shows a `StepView` (what is true now), a policy answers with a `StepPlan` (what to do next),
the backend does it and reports a `StepResult`. All of them are values: frozen, comparable, without I/O.
No view carries anything that a live server cannot know, such as how many tokens a request will still produce.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UnitKind = Literal["forward", "head_loss", "backward", "optimizer"]
"""A schedulable piece of finetuning; `backward` includes the recomputation of its layer's forward pass."""


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """Two disjoint SM partitions that the hardware can run side by side."""

    decode_sms: int
    finetune_sms: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a GPU offers. A policy may choose no partition that is not in here.

    ``splits`` is sorted by ``decode_sms``. Either side may also have all ``total_sms`` while the other one waits.
    """

    gpu: str
    total_sms: int
    splits: tuple[Split, ...]


@dataclass(frozen=True, slots=True)
class MemoryView:
    """The grid as it stands: rows (ranges of ``row_tokens`` tokens over all columns) and token slots.

    ``rows_total = rows_kv + rows_lent + rows_free``; a free row holds no token and is not lent.
    ``free_tokens`` counts unused token slots outside lent rows, ``used_tokens`` those that hold KV.
    """

    row_tokens: int
    row_bytes: int
    rows_total: int
    rows_kv: int
    rows_lent: int
    rows_free: int
    rows_reclaiming: int
    used_tokens: int
    free_tokens: int
    free_but_unlendable_bytes: int


@dataclass(frozen=True, slots=True)
class JobView:
    """One finetuning job beside a decode instance.

    ``rows_wanted`` rows would hold its whole working set, ``rows_floor`` are the fewest with which it can run. A unit
    that is still running at the boundary does so on ``in_flight_sms`` SMs and needs about ``in_flight_ms`` more; decode
    cannot have those SMs before that. Both are 0 between units.
    """

    job_id: str
    next_unit: UnitKind
    unit_tokens: int
    rows_held: int
    rows_wanted: int
    rows_floor: int
    window_layers: int
    layers: int
    in_flight_sms: int
    in_flight_ms: float


@dataclass(frozen=True, slots=True)
class StepView:
    """What is true at a step boundary of one decode instance.

    ``batch`` requests would decode in the next step and hold ``kv_tokens`` tokens; ``waiting`` more, with
    ``waiting_tokens`` prompt tokens, could not be admitted yet. ``elapsed_ms`` of the coming step latency has already
    passed (0 except while memory was awaited, or in a turn that an arrival ended early: the request joins that step).
    """

    instance: int
    step: int
    time_s: float
    batch: int
    kv_tokens: int
    waiting: int
    waiting_tokens: int
    elapsed_ms: float
    memory: MemoryView
    jobs: tuple[JobView, ...]


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What one finetuning job may do in the coming steps.

    ``sms`` SMs beside decode (0: it pauses while decode runs), the whole chip for ``turn_ms`` before each decode step
    (whole units only), and ``rows`` grid rows of memory; the backend lends or reclaims towards that number.
    """

    job_id: str
    sms: int
    turn_ms: float
    rows: int


@dataclass(frozen=True, slots=True)
class Hold:
    """How long a plan stays valid without asking again.

    It ends after ``steps`` steps, when something waits for memory, or after a step that took longer than
    ``max_step_ms`` (the guard's bound; `None`: no bound). Without ``batches`` it also ends when a request joins or
    leaves; with it, requests may come and go while the batch is within these two bounds (both included) and holds at
    most ``most_kv_tokens`` before a step (`None`: any number).
    """

    steps: int
    max_step_ms: float | None
    batches: tuple[int, int] | None = None
    most_kv_tokens: int | None = None

    def covers(self, batch: int, kv_tokens: int) -> bool:
        """Whether ``batch`` requests with ``kv_tokens`` tokens, other ones than before, may decode under the plan."""
        if self.batches is None or not self.batches[0] <= batch <= self.batches[1]:
            return False
        return self.most_kv_tokens is None or kv_tokens <= self.most_kv_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Decode on ``decode_sms`` SMs, each job as its `JobPlan` says, valid while ``hold`` holds.

    ``predicted_ms`` is the step latency (turn included) that the policy expects for the first step.
    """

    decode_sms: int
    jobs: tuple[JobPlan, ...]
    hold: Hold
    predicted_ms: float | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What steps of one batch under one plan really took; one entry a step, in order.

    A plan whose hold lets requests come and go has several results.

    ``latency_ms`` runs from one token emission to the next, ``decode_ms`` is the decode graph alone (on its partition,
    beside whatever ran there), ``turn_ms`` what finetuning used of its turn. Their difference is waiting and switching.
    ``idle_s`` is the time without any request that passed instead of steps (then the tuples are empty).
    ``unit_ratio``: forward and backward units that ended beside decode took so many times as long as the profile says of
    them there; `None` where none did, or nobody measures that (in simulation units are those of the samples).
    """

    instance: int
    first_step: int
    batch: int
    kv_tokens: int
    latency_ms: tuple[float, ...]
    decode_ms: tuple[float, ...]
    turn_ms: tuple[float, ...]
    idle_s: float = 0.0
    unit_ratio: float | None = None
