"""The result of a run in numbers, as DESIGN section 5 defines them; the same for both backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harli_core.hardware import GpuSheet
from harli_core.model import ModelShape
from harli_core.records import COMPLETED, REJECTED, RequestBook, StepBook

BINS, MANY, NARROW = 4096, 1 << 16, 1e-9
"""More than so many values with weights are counted into bins before those around a quantile are sorted, unless their
range is so small a part of themselves that bins would have no width."""

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}

TokenGaps = tuple[NDArray[np.float64], NDArray[np.int64]]
"""Gaps between tokens in milliseconds, and how many requests had each of them."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the books do not say: targets, the hardware, and what finetuning achieved."""

    qos_ms: float
    ttft_slo_ms: float
    total_sms: int
    gpus: int
    duration_s: float
    finetune_tokens: int
    finetune_steps: int
    finetune_gpus: int


def distribution(
    values: NDArray[np.float64], weights: NDArray[np.int64] | None = None
) -> dict[str, float | int] | None:
    """Mean, quantiles (values that occurred), maximum and count; `None` for no values."""
    count = len(values) if weights is None else int(weights.sum())
    if count == 0:
        return None
    found: dict[str, float | int] = {"count": count, "mean": float(np.average(values, weights=weights))}
    levels = list(QUANTILES.values())
    if weights is None or len(values) <= MANY:
        quantiles = _numpy_quantiles(values, weights, levels)
    else:
        quantiles = quantiles_of_many(values, weights, levels)
    found.update(zip(QUANTILES, quantiles, strict=True))
    found["max"] = float(values.max())
    return found


def _numpy_quantiles(
    values: NDArray[np.float64], weights: NDArray[np.int64] | None, levels: Sequence[float]
) -> list[float]:
    quantiles: list[float] = np.quantile(values, levels, method="inverted_cdf", weights=weights).tolist()
    return quantiles


def quantiles_of_many(values: NDArray[np.float64], weights: NDArray[np.int64], levels: Sequence[float]) -> list[float]:
    """What `numpy.quantile` finds with ``inverted_cdf``, for ``levels`` in (0, 1); some weight must be positive.

    To sort millions of values takes longer than the rest of a summary, so only those in a level's narrow bin are sorted.
    """
    least, most = float(values.min()), float(values.max())
    if most - least < NARROW * max(abs(least), abs(most)):
        return _numpy_quantiles(values, weights, levels)
    in_bin, edges = np.histogram(values, bins=BINS, weights=weights)
    up_to = np.cumsum(in_bin)
    total = up_to[-1]
    found: list[float] = []
    for level in levels:
        chosen = int(np.searchsorted(up_to / total, level))
        below = up_to[chosen] - in_bin[chosen]
        inside = (values >= edges[chosen]) & (values <= edges[chosen + 1])
        near, near_weights = values[inside], weights[inside]
        order = np.argsort(near)
        place = int(np.searchsorted((below + np.cumsum(near_weights[order])) / total, level))
        found.append(float(near[order[place]]))
    return found


def summarise(requests: RequestBook, steps: StepBook, facts: RunFacts) -> dict[str, Any]:
    """All result sections except what only a backend knows (its own counters, utilisation)."""
    gaps = token_gaps(steps)
    return {
        "requests": request_counts(requests),
        "duration_s": facts.duration_s,
        **request_latencies(requests, gaps),
        "itl_over_target": itl_over_target(gaps, facts),
        **slo(requests, facts),
        "steps": step_section(steps, facts),
        "finetune": finetune_section(facts),
    }


def request_counts(book: RequestBook) -> dict[str, Any]:
    """Arrivals, what became of them, and the tokens that they brought and asked for."""
    arrived = np.isfinite(book.arrival_s)
    reasons: dict[str, int] = {}
    for index in sorted(book.reasons):
        reasons[book.reasons[index]] = reasons.get(book.reasons[index], 0) + 1
    return {
        "arrivals": int(arrived.sum()),
        "completed": int((book.state == COMPLETED).sum()),
        "rejected": int((book.state == REJECTED).sum()),
        "unfinished": int((arrived & (book.state == 0)).sum()),
        "not_arrived": int((~arrived).sum()),
        "rejection_reasons": reasons,
        "preemptions": int(book.preemptions.sum()),
        "prompt_tokens": int(book.prompt_tokens[arrived].sum()),
        "output_tokens_asked": int(book.output_tokens[arrived].sum()),
        "output_tokens_produced": int(book.produced_tokens.sum()),
    }


def request_latencies(book: RequestBook, gaps: TokenGaps) -> dict[str, Any]:
    """TTFT, TPOT and ITL in milliseconds."""
    ttft_s, tpot_s = book.ttft_s(), book.tpot_s()
    return {
        "ttft_ms": distribution(ttft_s[np.isfinite(ttft_s)] * 1000.0),
        "tpot_ms": distribution(tpot_s[np.isfinite(tpot_s)] * 1000.0),
        "itl_ms": distribution(*gaps),
    }


def token_gaps(steps: StepBook) -> TokenGaps:
    """Gaps between tokens in milliseconds, and how many requests had each of them.

    One gap for each request of a step that was in the step before; a request that joins has a gap of its own, from its
    last token (prefill's, or before a preemption) to its first here.
    """
    latency_ms = np.frombuffer(steps.latency_ms)
    weights = np.array(steps.spread("batch"), dtype=np.int64)
    first = np.cumsum(steps.span_steps()) - steps.span_steps()
    weights[first] -= np.asarray(steps.span_column("joined"), dtype=np.int64)
    join_gap_ms = np.frombuffer(steps.join_gap_ms)
    gaps_ms = np.concatenate((latency_ms, join_gap_ms))
    gap_weights = np.concatenate((weights, np.ones(len(join_gap_ms), dtype=np.int64)))
    return gaps_ms, gap_weights


def itl_over_target(gaps: TokenGaps, facts: RunFacts) -> dict[str, int | float | None]:
    """How many gaps between tokens were longer than the target, and their share of all gaps."""
    gaps_ms, weights = gaps
    count, total = int(weights[gaps_ms > facts.qos_ms].sum()), int(weights.sum())
    return {"count": count, "share": count / total if total else None}


def slo(book: RequestBook, facts: RunFacts) -> dict[str, Any]:
    """Share of finished requests within both limits, and their rate.

    Rejected requests are outside; unfinished ones, which a horizon cut off, are left out.
    """
    ttft_ms, tpot_ms = book.ttft_s() * 1000.0, book.tpot_s() * 1000.0
    within = (book.state == COMPLETED) & (ttft_ms <= facts.ttft_slo_ms)
    within &= (tpot_ms <= facts.qos_ms) | (book.output_tokens == 1)
    finished = int(((book.state == COMPLETED) | (book.state == REJECTED)).sum())
    count = int(within.sum())
    return {
        "slo_attainment": count / finished if finished else None,
        "goodput_rps": count / facts.duration_s if facts.duration_s else None,
    }


def step_section(steps: StepBook, facts: RunFacts) -> dict[str, Any]:
    """Step latency, violations, prediction error and where SM time went."""
    latency_ms = np.frombuffer(steps.latency_ms)
    decode_ms, turn_ms = np.frombuffer(steps.decode_ms), np.frombuffer(steps.turn_ms)
    count = len(latency_ms)
    gpu_ms = facts.total_sms * facts.gpus * facts.duration_s * 1000.0
    decode_sm_ms = float(np.dot(steps.spread("decode_sms"), decode_ms))
    finetune_sm_ms = float(np.dot(steps.spread("finetune_sms"), decode_ms)) + facts.total_sms * float(turn_ms.sum())
    finetune_sm_ms += steps.idle_finetune_sm_s * 1000.0
    violations = steps.solo_violations + steps.finetune_violations
    return {
        "count": count,
        "latency_ms": distribution(latency_ms),
        "decode_ms": distribution(decode_ms),
        "mean_batch": float(np.dot(steps.span_column("batch"), steps.span_steps()) / count) if count else None,
        "within_target": 1.0 - violations / count if count else None,
        "violations": {"solo": steps.solo_violations, "finetune_caused": steps.finetune_violations},
        "prediction_error": prediction_error(steps),
        "sm_allotment": {
            "decode": decode_sm_ms / gpu_ms if gpu_ms else None,
            "finetune": finetune_sm_ms / gpu_ms if gpu_ms else None,
        },
        "busy_s": float(latency_ms.sum()) / 1000.0,
        "idle_s": steps.idle_s,
        "free_but_unlendable_bytes": distribution(
            np.asarray(steps.span_column("free_but_unlendable_bytes"), dtype=np.float64),
            steps.span_steps().astype(np.int64),
        ),
    }


def prediction_error(steps: StepBook) -> dict[str, float | int] | None:
    """Relative error of the step latency that the policy expected of the first step of each plan."""
    first = np.cumsum(steps.span_steps()) - steps.span_steps()
    predicted_ms = steps.span_column("predicted_ms")
    known = np.isfinite(predicted_ms)
    measured_ms = np.frombuffer(steps.latency_ms)[first[known]]
    error = np.abs(predicted_ms[known] / measured_ms - 1.0)
    if not len(error):
        return None
    return {
        "count": len(error),
        "mean": float(error.mean()),
        "p99": float(np.quantile(error, 0.99, method="inverted_cdf")),
        "max": float(error.max()),
    }


def finetune_section(facts: RunFacts) -> dict[str, Any]:
    """Tokens of completed optimizer steps."""
    return {
        "gpus": facts.finetune_gpus,
        "tokens": facts.finetune_tokens,
        "optimizer_steps": facts.finetune_steps,
        "tokens_per_s": facts.finetune_tokens / facts.duration_s if facts.duration_s else None,
    }


def utilisation(
    steps: StepBook, served: ModelShape, finetuned: ModelShape, finetune_tokens: float, sheet: GpuSheet, facts: RunFacts
) -> dict[str, float | None]:
    """Eq. 1 estimated from arithmetic: work done over what the peaks would allow in the whole time.

    Weighting each kernel's utilisation by its share of time (Eq. 1) equals total work over peak times total time. Decode
    reads all weights and the batch's KV once a step and multiplies every weight once a token; finetuning multiplies
    frozen weights three times a token (forward, its recomputation, input gradients). Traffic of finetuning is left out.
    """
    seconds = facts.duration_s * facts.gpus
    if not seconds:
        return {"sm": None, "dram": None}
    batch = np.asarray(steps.spread("batch"), dtype=np.float64)
    kv_tokens = steps.spread("kv_tokens") + steps.step_within_span() * batch
    weights = served.weight_bytes / served.dtype_bytes
    attention_flops = 4.0 * served.layers * served.heads * served.head_dim
    flops = 2.0 * weights * float(batch.sum()) + attention_flops * float(kv_tokens.sum())
    flops += 3.0 * 2.0 * (finetuned.weight_bytes / finetuned.dtype_bytes) * finetune_tokens
    moved = served.weight_bytes * float(len(batch)) + served.kv_bytes_per_token * float(kv_tokens.sum())
    return {"sm": flops / (sheet.peak_flops * seconds), "dram": moved / (sheet.peak_bytes_per_s * seconds)}
