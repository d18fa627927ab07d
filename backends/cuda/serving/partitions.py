"""The SM partitions of a serving process, and the streams that belong to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from backends.cuda._native import HostPartitions, SmPartitions
from harli_core.errors import BackendUnavailableError, DriverCallError
from harli_core.types import Split

Kind = Literal["green_contexts", "stream_priorities", "host"]

TEST_SIZE = 512
"""Rows and columns of the product that each partition is tried with."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Where decode and finetuning run side by side; streams are `torch.cuda.Stream`, `None` on the host."""

    split: Split
    decode_stream: Any
    finetune_stream: Any


class Partitions:
    """One lane a split of the profile, and one stream each for the whole chip; made once, before any graph.

    ``group(split)`` numbers the decode graph sets: a set for each lane, the last one for the whole chip.
    """

    def __init__(
        self, kind: Kind, total_sms: int, lanes: Sequence[Lane], whole: Lane, native: SmPartitions | None
    ) -> None:
        """``native`` owns the streams of the lanes."""
        self.kind: Kind = kind
        self.total_sms = total_sms
        self.lanes = tuple(lanes)
        self.whole = whole
        self._native = native
        self._group_of = {lane.split.decode_sms: index for index, lane in enumerate(self.lanes)}
        self._finetune = {lane.split.finetune_sms: lane.finetune_stream for lane in self.lanes}

    @property
    def groups(self) -> int:
        """Graph sets."""
        return len(self.lanes) + 1

    @property
    def decode_streams(self) -> list[Any]:
        """The stream that each graph set is captured on."""
        return [*(lane.decode_stream for lane in self.lanes), self.whole.decode_stream]

    def group(self, decode_sms: int) -> int:
        """The graph set for decode on ``decode_sms`` SMs."""
        return self._group_of.get(decode_sms, len(self.lanes))

    def finetune_stream(self, sms: int) -> Any:
        """The stream for a unit on ``sms`` SMs."""
        return self.whole.finetune_stream if sms >= self.total_sms else self._finetune[sms]


def host_partitions(splits: Sequence[Split], total_sms: int) -> Partitions:
    """Partitions that only count, for a CPU."""
    native = HostPartitions(total_sms, [split.finetune_sms for split in splits], 1)
    lanes = [Lane(split, None, None) for split in splits]
    return Partitions("host", total_sms, lanes, Lane(Split(total_sms, total_sms), None, None), native)


def cuda_partitions(splits: Sequence[Split], total_sms: int, warn: Any) -> Partitions:
    """Green contexts for ``splits`` on the current GPU, each tried with a product; else stream priorities.

    ``warn(text)`` is told where the hardware gives less than the profile promises. Raises `BackendUnavailableError`
    where the profile is of another GPU, or a partition does not compute.
    """
    import torch

    device = torch.cuda.current_device()
    whole = Lane(Split(total_sms, total_sms), torch.cuda.Stream(), torch.cuda.Stream())
    here = torch.cuda.get_device_properties(device).multi_processor_count
    if here != total_sms:
        raise BackendUnavailableError(
            f"the profile is of a GPU with {total_sms} SMs, this one has {here}: measure it with 'harli profile'"
        )
    try:
        from backends.cuda._native import CudaPartitions

        native = CudaPartitions(device, [split.finetune_sms for split in splits])
    except (ImportError, DriverCallError) as error:
        warn(f"no SM partitions here ({error}); decode and finetuning share all SMs, decode with the higher priority")
        lanes = [Lane(split, torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=0)) for split in splits]
        return Partitions("stream_priorities", total_sms, lanes, whole, None)
    lanes = []
    for split, (decode_sms, finetune_sms, decode_stream, finetune_stream) in zip(splits, native.pairs, strict=True):
        if (decode_sms, finetune_sms) != (split.decode_sms, split.finetune_sms):
            raise BackendUnavailableError(
                f"the profile has a split of {split.decode_sms}+{split.finetune_sms} SMs, this GPU gives "
                f"{decode_sms}+{finetune_sms}: measure it with 'harli profile'"
            )
        streams = (torch.cuda.ExternalStream(decode_stream), torch.cuda.ExternalStream(finetune_stream))
        lanes.append(Lane(split, *streams))
    partitions = Partitions("green_contexts", total_sms, lanes, whole, native)
    for lane in (*partitions.lanes, whole):
        for side, stream in (("decode", lane.decode_stream), ("finetuning", lane.finetune_stream)):
            _try(stream, f"the partition for {side} of split {lane.split.decode_sms}+{lane.split.finetune_sms}")
    return partitions


def _try(stream: Any, what: str) -> None:
    """cuBLAS can fail on a partition that is too small for it: find out before anything is served."""
    import torch

    try:
        with torch.cuda.stream(stream):
            ones = torch.ones(TEST_SIZE, TEST_SIZE, device="cuda", dtype=torch.bfloat16)
            product = ones @ ones
        stream.synchronize()
        right = bool((product == TEST_SIZE).all())
    except RuntimeError as error:
        raise BackendUnavailableError(f"{what} does not compute: {str(error).splitlines()[0]}") from None
    if not right:
        raise BackendUnavailableError(f"{what} computes wrong products")
