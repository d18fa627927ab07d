"""Matrix products of decode graphs on a partition: planned by cuBLAS for its SMs where that is faster, else for the chip.

cuBLAS chooses tiles, and how it divides the work, for as many SMs as the chip has. Told those of the partition, products of
16 or 128 requests take up to 40 % less time on few SMs, and those of 64 more, so each batch size is tried on each partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from backends.cuda.finetune.sm_target import SmCountTarget
from backends.cuda.serving.partitions import Partitions

BETTER = 0.98
"""Telling cuBLAS has to take less than this part of the time, so that noise does not decide."""

REPEATS = 3


class PartitionGemms:
    """Decides while SGLang captures its decode graphs, and remembers what it decided."""

    def __init__(
        self,
        partitions: Partitions,
        products_ms: Callable[[Any, int], float] | None = None,
        target: SmCountTarget | None = None,
    ) -> None:
        """``products_ms(model, batch)`` times a step's products on the current stream [default: `time_products`]."""
        self.told: dict[tuple[int, int], bool] = {}
        """By graph set and batch size: whether its products are planned for the partition."""
        self._sms = [lane.split.decode_sms for lane in partitions.lanes]
        self._products_ms = products_ms or time_products
        self._target = target or SmCountTarget()

    @property
    def by_sms(self) -> dict[int, list[int]]:
        """Batch sizes whose products are planned for the partition, by its SMs."""
        found: dict[int, list[int]] = {sms: [] for sms in self._sms}
        for (group, batch), told in sorted(self.told.items()):
            if told:
                found[self._sms[group]].append(batch)
        return found

    @contextmanager
    def while_capturing(self) -> Iterator[None]:
        """Decode graphs that SGLang captures inside are planned as decided."""
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner as Runner

        capture = Runner.capture_one_shape

        def planned(runner: Any, size: int, forward: Any, stream_idx: int | None = None, *more: Any) -> Any:
            with self._target.set_to(self._planned_for(runner.model_runner.model, size, stream_idx)):
                return capture(runner, size, forward, stream_idx, *more)

        Runner.capture_one_shape = planned
        try:
            yield
        finally:
            Runner.capture_one_shape = capture

    def _planned_for(self, model: Any, batch: int, group: int | None) -> int | None:
        """SMs to plan for, `None`: the whole chip."""
        if group is None or group >= len(self._sms) or not self._target.available:
            return None
        plain_ms = self._products_ms(model, batch)
        with self._target.set_to(self._sms[group]):
            told_ms = self._products_ms(model, batch)
        self.told[group, batch] = told_ms < BETTER * plain_ms
        return self._sms[group] if self.told[group, batch] else None


def time_products(model: Any, batch: int) -> float:
    """Milliseconds of a decode step's matrix products for ``batch`` requests on the current stream, head included."""
    import torch

    weights = layer_weights(model)
    head = getattr(getattr(model, "lm_head", None), "weight", None)
    layers = len(model.model.layers)
    return layers * _linear_ms(torch, weights, batch) + (0.0 if head is None else _linear_ms(torch, [head], batch))


def layer_weights(model: Any) -> list[Any]:
    """The matrices of the first decoder layer, [out, in] each."""
    return [part for part in model.model.layers[0].parameters() if part.dim() == 2 and part.is_floating_point()]


def _linear_ms(torch: Any, weights: Sequence[Any], batch: int) -> float:
    """The median of a few products with all of ``weights``, after one that is not counted."""
    inputs = [torch.zeros(batch, weight.shape[1], device=weight.device, dtype=weight.dtype) for weight in weights]
    found = []
    for _ in range(1 + REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for rows, weight in zip(inputs, weights, strict=True):
            torch.nn.functional.linear(rows, weight)
        end.record()
        end.synchronize()
        found.append(float(begin.elapsed_time(end)))
    return sorted(found[1:])[REPEATS // 2]
