"""Capturing work as CUDA graphs, on partitions too; the memory that graphs and eager units of a stream share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from backends.cuda.finetune.sm_target import SmCountTarget, stream_sms

TIMED_REPLAYS = 3


class CudaCapture:
    """Implements `layer_graphs.Capture` with torch's graphs; units of one stream share their intermediate memory.

    They may, as none of its tensors outlives a unit (results are copied out) and units never overlap. Without that, head +
    loss would have a gigabyte of its own on each stream (ADR 12).
    """

    def __init__(self, device: Any) -> None:
        """Nothing is captured yet."""
        import torch

        self._torch = torch
        self._chip_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._target = SmCountTarget()
        self._sms: dict[int, int | None] = {}
        self._pools: dict[int, Any] = {}

    def key(self, stream: Any) -> int | None:
        """See `layer_graphs.Capture`; the default stream cannot be captured."""
        return int(stream.cuda_stream) or None

    def sms(self, stream: Any) -> int | None:
        """See `layer_graphs.Capture`."""
        if stream.cuda_stream not in self._sms:
            sms = stream_sms(stream) if self._target.available else None
            self._sms[stream.cuda_stream] = sms if sms is not None and sms < self._chip_sms else None
        return self._sms[stream.cuda_stream]

    def planned_for(self, sms: int | None) -> AbstractContextManager[None]:
        """See `layer_graphs.Capture`."""
        return self._target.set_to(sms)

    def capture(self, module: Any, work: Callable[[], None], stream: Any, sms: int | None) -> Any:  # noqa: ARG002
        """See `layer_graphs.Capture`; the current stream is ``stream``."""
        graph = self._torch.cuda.CUDAGraph()
        with self._target.set_to(sms):
            # Not torch.cuda.graph: it waits for the GPU, collects garbage and empties torch's cache each time.
            graph.capture_begin(pool=self._pool(stream).id, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph

    def ms(self, graph: Any) -> float:
        """See `layer_graphs.Capture`."""
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(TIMED_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def memory(self, stream: Any) -> AbstractContextManager[None]:
        """See `layer_graphs.Capture`."""
        if self.key(stream) is None:
            return nullcontext()
        return cast("AbstractContextManager[None]", self._torch.cuda.use_mem_pool(self._pool(stream)))

    def _pool(self, stream: Any) -> Any:
        if stream.cuda_stream not in self._pools:
            self._pools[stream.cuda_stream] = self._torch.cuda.MemPool()
        return self._pools[stream.cuda_stream]

    def forget(self, key: int) -> None:
        """See `layer_graphs.Capture`."""
        self._sms.pop(key, None)
        self._pools.pop(key, None)
