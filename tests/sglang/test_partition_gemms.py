"""Decode graphs of a partition are planned for its SMs where that was faster, and nothing of SGLang stays replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.cuda.serving import sglang_version
from backends.cuda.serving.partition_gemms import PartitionGemms, layer_weights
from backends.cuda.serving.partitions import host_partitions
from harli_core.types import Split

pytestmark = pytest.mark.filterwarnings("ignore")

SPLITS = (Split(20, 112), Split(68, 64))


class Target:
    """What cuBLAS was told, and is told now."""

    def __init__(self, *, available: bool = True) -> None:
        """Nothing yet."""
        self.available = available
        self.now: int | None = None

    @contextmanager
    def set_to(self, sms: int | None) -> Iterator[None]:
        """As `SmCountTarget.set_to`."""
        before, self.now = self.now, sms
        try:
            yield
        finally:
            self.now = before


def captured(monkeypatch: pytest.MonkeyPatch, ms: Any, target: Target) -> tuple[PartitionGemms, list[Any]]:
    """What was told while SGLang's runner captured three sizes on two partitions and the whole chip."""
    sglang_version.prepare("cpu")
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    seen: list[tuple[int | None, int, int | None]] = []

    def capture(_runner: Any, size: int, _forward: Any, stream_idx: int | None = None, *_more: Any) -> None:
        seen.append((stream_idx, size, target.now))

    monkeypatch.setattr(DecodeCudaGraphRunner, "capture_one_shape", capture)
    gemms = PartitionGemms(host_partitions(SPLITS, 132), ms(target), target)  # type: ignore[arg-type]
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=None))
    with gemms.while_capturing():
        for group in (0, 1, 2, None):
            for size in (16, 64, 128):
                DecodeCudaGraphRunner.capture_one_shape(runner, size, None, group, None)
    assert DecodeCudaGraphRunner.capture_one_shape is capture
    assert target.now is None
    return gemms, seen


def test_the_faster_plan_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H200: 16 and 128 gain on few SMs, 64 loses, one percent is no reason; the whole chip is never told."""

    def ms(target: Target) -> Any:
        gain = {(20, 16): 0.7, (20, 64): 1.2, (20, 128): 0.6, (68, 16): 0.95, (68, 64): 1.1, (68, 128): 0.99}
        return lambda _model, batch: 3.0 * (1.0 if target.now is None else gain[target.now, batch])

    gemms, seen = captured(monkeypatch, ms, Target())
    assert [told for group, _, told in seen if group == 0] == [20, None, 20]
    assert [told for group, _, told in seen if group == 1] == [68, None, None]
    assert {told for group, _, told in seen if group in (2, None)} == {None}
    assert gemms.by_sms == {20: [16, 128], 68: [16]}


def test_without_cublas_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's library is not found, graphs are captured as ever."""

    def ms(_target: Target) -> Any:
        return lambda *_: pytest.fail("timed")

    gemms, seen = captured(monkeypatch, ms, Target(available=False))
    assert {told for _, _, told in seen} == {None}
    assert gemms.by_sms == {20: [], 68: []}


def test_matrices_of_a_layer_are_found(instance: Any) -> None:
    """The four that SGLang makes of a Llama's seven: q, k and v are one, gate and up another."""
    model = instance.decoder.scheduler.tp_worker.model_runner.model
    weights = layer_weights(model)
    assert len(weights) == 4
    assert all(weight.dim() == 2 and weight.dtype.is_floating_point for weight in weights)
    assert sum(weight.numel() for weight in weights) > 0.9 * sum(
        part.numel() for part in model.model.layers[0].parameters()
    )
    assert isinstance(weights[0], torch.Tensor)
