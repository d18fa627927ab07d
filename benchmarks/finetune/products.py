"""Counting the arithmetic of matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

COUNTED = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


class Products(TorchDispatchMode):  # type: ignore[misc]  # Any where torch is not installed
    """Adds up, while it is entered, what torch's formulas say for each matrix product, backward passes included.

    Attention kernels are not counted: torch's formulas for them change from version to version. Torch's own mode around
    the formulas also follows modules, which `torch.autograd.grad` does not allow. Work of other threads and replayed
    graphs is not seen.
    """

    def __init__(self) -> None:
        """None yet."""
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it, and count it."""
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in COUNTED:
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result
