"""The run-time predictor: a fitted profile evaluated by plain arithmetic, no numerical library imported."""

from __future__ import annotations

from dataclasses import dataclass

from harli_core.errors import ConfigError
from harli_core.predict.profile import Profile
from harli_core.predict.solo import launched_batch
from harli_core.types import UnitKind


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """Predicted duration of one decode step; the tuples follow ``profile.splits``.

    ``solo_ms``: alone on the split's decode SMs (Eq. 2). ``colocated_ms``: beside finetuning on the split's other SMs
    (Eq. 3). ``whole_chip_ms``: alone on all SMs.
    """

    solo_ms: tuple[float, ...]
    colocated_ms: tuple[float, ...]
    whole_chip_ms: float


@dataclass(frozen=True, slots=True)
class BatchLines:
    """For one batch, every prediction is a line in the KV tokens: (ms at no KV, ms a KV token)."""

    solo: tuple[tuple[float, float], ...]
    colocated: tuple[tuple[float, float], ...]
    whole_chip: tuple[float, float]


class StepPredictor:
    """Predicts decode steps and finetune units from ``profile``; remembers the coefficients of each batch size."""

    def __init__(self, profile: Profile) -> None:
        """Evaluate nothing yet."""
        self.profile = profile
        self._slowdowns = tuple(profile.slowdown(split) for split in profile.splits)
        self._lines: dict[int, BatchLines] = {}
        self._alone_ms: dict[tuple[UnitKind, int, int], float] = {}
        self._beside_ms: dict[tuple[UnitKind, int, int], float] = {}

    def predict(self, batch: int, kv_tokens: int) -> StepPrediction:
        """Predict one step of ``batch`` >= 1 requests that hold ``kv_tokens`` >= 0 tokens, for every split.

        Raises `ConfigError` for an empty batch: there is no step to predict.
        """
        lines = self.lines(batch)
        if kv_tokens < 0:
            raise ConfigError(f"cannot predict a step with {kv_tokens} KV tokens: need 0 or more")
        fixed_ms, token_ms = lines.whole_chip
        return StepPrediction(
            tuple([a + k * kv_tokens for a, k in lines.solo]),
            tuple([a + k * kv_tokens for a, k in lines.colocated]),
            fixed_ms + token_ms * kv_tokens,
        )

    def lines(self, batch: int) -> BatchLines:
        """The predictions for ``batch`` >= 1 requests as lines in their KV tokens; `ConfigError` for an empty batch."""
        found = self._lines.get(batch)
        return self._lines_of(batch) if found is None else found

    def unit_ms(self, kind: UnitKind, tokens: int, sms: int) -> float:
        """Duration of one finetune unit of ``tokens`` tokens alone on ``sms`` SMs."""
        key = (kind, tokens, sms)
        found = self._alone_ms.get(key)
        if found is None:
            total_sms = self.profile.total_sms
            if tokens < 1 or not 1 <= sms <= total_sms:
                raise ConfigError(
                    f"cannot predict a unit of {tokens} tokens on {sms} SMs: need 1 token or more, 1 to {total_sms} SMs"
                )
            found = self._alone_ms[key] = self.profile.finetune.unit(kind).predict_ms(tokens, sms)
        return found

    def unit_beside_ms(self, kind: UnitKind, tokens: int, split_index: int) -> float:
        """Duration of one finetune unit on the finetune SMs of ``profile.splits[split_index]`` while decode runs."""
        key = (kind, tokens, split_index)
        found = self._beside_ms.get(key)
        if found is None:
            splits = self.profile.splits
            if not 0 <= split_index < len(splits):
                raise ConfigError(f"no split {split_index}: the profile has splits 0 to {len(splits) - 1}")
            alone_ms = self.unit_ms(kind, tokens, splits[split_index].finetune_sms)
            found = self._beside_ms[key] = alone_ms * self.profile.finetune.beside[split_index]
        return found

    def _lines_of(self, batch: int) -> BatchLines:
        if batch < 1:
            raise ConfigError(f"cannot predict a step of {batch} requests: need at least 1")
        profile = self.profile
        launched = launched_batch(batch, profile.graph_batches)
        solo = tuple(profile.solo.line(split.decode_sms, launched) for split in profile.splits)
        colocated = tuple((a * factor, k * factor) for (a, k), factor in zip(solo, self._slowdowns, strict=True))
        lines = BatchLines(solo, colocated, profile.solo.line(profile.total_sms, launched))
        self._lines[batch] = lines
        return lines
