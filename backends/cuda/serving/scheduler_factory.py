"""A `Scheduler` of SGLang in this process, with our pool, allocator and SM partitions in the places of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.cuda.serving import sglang_version
from backends.cuda.serving.kv_pool import PINNED_TOKENS, KvSettings
from backends.cuda.serving.partitions import Partitions

GRAPH_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256)
"""Batch sizes that decode graphs are captured for; others are padded to the next one.

Each is captured once a partition, which costs start-up time and memory. A padded row has no KV, but where SMs are few
it takes as long as any other: 64 rows a sixth longer than 48 on 20 SMs. Beyond 128 more sizes gain little.
"""

GRAPH_STRIDE = 64
"""From one size to the next beyond those."""


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """What SGLang is started with. ``kv_tokens`` token slots, slot 0 included, make whole rows of the grid."""

    model_path: Path
    kv_tokens: int
    max_batch: int
    context_tokens: int
    device: str = "cuda"
    load_format: str = "auto"
    dtype: str = "auto"
    deterministic: bool = False
    graph_batches: Sequence[int] = GRAPH_BATCHES
    kv: KvSettings = field(default_factory=KvSettings)
    unified: bool = True
    overlap: bool = False
    seed: int = 0


def graph_sizes(max_batch: int, batches: Sequence[int] = GRAPH_BATCHES) -> list[int]:
    """Sizes of decode graphs, for each batch up to ``max_batch``: a step without one could not wait for a unit."""
    beyond = range(max(batches) + GRAPH_STRIDE, max_batch + GRAPH_STRIDE, GRAPH_STRIDE)
    return sorted({min(batch, max_batch) for batch in (*batches, *beyond)})


def server_args(settings: ServingSettings, groups: int) -> Any:
    """SGLang's arguments for ``groups`` decode graph sets."""
    from sglang.srt.server_args import ServerArgs

    on_gpu = settings.device == "cuda"
    batches = graph_sizes(settings.max_batch, settings.graph_batches)
    values: dict[str, Any] = {
        "model_path": str(settings.model_path),
        "load_format": settings.load_format,
        "dtype": settings.dtype,
        "device": settings.device,
        "skip_tokenizer_init": True,
        "attention_backend": "triton" if on_gpu else "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_radix_cache": True,
        "disable_overlap_schedule": not settings.overlap,
        "chunked_prefill_size": -1,
        "max_total_tokens": settings.kv_tokens - PINNED_TOKENS,
        "max_running_requests": settings.max_batch,
        "mem_fraction_static": 0.95 if on_gpu else 0.5,
        "random_seed": settings.seed,
        "log_level": "warning",
        "enable_deterministic_inference": settings.deterministic,
    }
    if on_gpu:
        values |= {
            "cuda_graph_bs_decode": batches,
            "disable_prefill_cuda_graph": True,
            "disable_flashinfer_autotune": True,
        }
        if groups > 1:
            values |= {"enable_pdmux": True, "sm_group_num": groups}
    else:
        values["disable_cuda_graph"] = True
    return ServerArgs(**values)


def make_scheduler(settings: ServingSettings, partitions: Partitions | None) -> Any:
    """Load the model, take the memory, capture the graphs (on the current stream). ``partitions`` of `None`: no groups.

    ``settings.unified`` of `False` leaves SGLang's own pool, for comparisons.
    """
    sglang_version.prepare(settings.device)
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import PortArgs, set_global_server_args_for_scheduler

    if settings.unified:
        from backends.cuda.serving.plugin import register

        register(settings.kv)
    groups = 1 if partitions is None or settings.device == "cpu" else partitions.groups
    args = server_args(settings, groups)
    set_global_server_args_for_scheduler(args)
    kind = _with_partitions(Scheduler, partitions) if groups > 1 and partitions is not None else Scheduler
    return kind(args, PortArgs.init_new(args), 0, 0, 0, 0, 0, 0, None)


def _with_partitions(scheduler: Any, partitions: Partitions) -> Any:
    """SGLang's scheduler with our streams as the stream groups of its multiplexing."""

    class PartitionedScheduler(scheduler):  # type: ignore[misc]
        def init_pdmux(self) -> None:
            from sglang.srt.multiplex import pdmux_context

            streams = partitions.decode_streams
            counts = [(lane.split.finetune_sms, lane.split.decode_sms) for lane in partitions.lanes]
            counts.append((0, partitions.total_sms))
            pdmux_context.STREAM_GROUPS = [(partitions.whole.finetune_stream, stream) for stream in streams]
            pdmux_context.SM_COUNTS = counts
            pdmux_context.CURRENT_STREAM_IDX = len(streams) - 1
            pdmux_context.CURRENT_STREAM_GROUP = pdmux_context.STREAM_GROUPS[-1]
            self.split_prefill_batch = None
            self.stream_groups = pdmux_context.STREAM_GROUPS
            self.sm_counts = counts
            self.real_sm_group_num = len(streams)

    return PartitionedScheduler
