"""The tail: what is left between measurement and prediction over long sequences of steps, once the clocks settled.

Short samples understate sustained co-running: over 1,000 steps it settles up to 23 % higher. The regressions stay with
the short samples (they cover every batch and split); these ratios carry the level and the spread, and feed the online
residual correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from harli_core.predict.colocated import ColocatedModel
from harli_core.predict.regression import quantiles
from harli_core.predict.samples import StepSequence
from harli_core.predict.solo import SoloModel

SETTLING_STEPS = 250
"""Steps of a recorded sequence during which the GPU's clocks still settle; left out of the tail."""


@dataclass(frozen=True, slots=True)
class Tail:
    """Evenly spaced quantiles (minimum to maximum) of measured / predicted over long step sequences, clocks settled.

    ``solo``: decode on the whole chip. ``colocated``: beside finetuning; its median is above 1, because sustained
    co-running is slower than the short samples of the regressions, so the online correction starts at that level.
    ``colocated_spread``: each sequence over its own median instead, what is left once the level is known.
    """

    solo: tuple[float, ...]
    colocated: tuple[float, ...]
    colocated_spread: tuple[float, ...]


def residual_tail(
    sequences: Sequence[StepSequence], total_sms: int, solo: SoloModel, colocated: ColocatedModel
) -> Tail:
    """Measured over predicted in the settled part of every sequence; one of each kind must be that long."""
    alone: list[float] = []
    beside: list[float] = []
    spread: list[float] = []
    for sequence in sequences:
        settled_ms = sequence.ms[SETTLING_STEPS:]
        if not settled_ms:
            continue
        kv_tokens = sequence.batch * sequence.context_tokens
        predicted_ms = solo.predict_ms(sequence.decode_sms, sequence.batch, kv_tokens)
        if sequence.finetune_sms == 0:
            alone.extend(ms / predicted_ms for ms in settled_ms)
            continue
        predicted_ms *= colocated.slowdown(sequence.decode_sms / total_sms, sequence.finetune_sms / total_sms)
        level_ms = median(settled_ms)
        beside.extend(ms / predicted_ms for ms in settled_ms)
        spread.extend(ms / level_ms for ms in settled_ms)
    return Tail(quantiles(alone), quantiles(beside), quantiles(spread))
