"""Streams on part of the chip's SMs: one split through the driver API, the aligned group of it."""

from __future__ import annotations

from typing import Any

import torch


def partition_stream(sms: int) -> tuple[Any, int]:
    """A stream on ``sms`` SMs (a multiple of 8, the aligned group of one split) and how many it really has."""
    from cuda.bindings import driver

    def checked(answer: tuple[Any, ...]) -> Any:
        fault, *values = answer
        if int(fault) != 0:
            raise RuntimeError(f"driver call failed: {fault}")
        return values[0] if len(values) == 1 else values

    device = checked(driver.cuDeviceGet(torch.cuda.current_device()))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = checked(driver.cuDeviceGetDevResource(device, kind))
    groups, _count, _rest = checked(driver.cuDevSmResourceSplitByCount(1, whole, 0, sms))
    description = checked(driver.cuDevResourceGenerateDesc([groups[0]], 1))
    context = checked(
        driver.cuGreenCtxCreate(description, device, driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
    )
    stream = checked(driver.cuGreenCtxStreamCreate(context, int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING), 0))
    return torch.cuda.ExternalStream(int(stream)), int(groups[0].sm.smCount)
