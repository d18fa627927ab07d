"""The kernels between a layer's products, on a CPU: Triton interprets them, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backends.cuda.finetune import layer_kernels
from tests.sglang.processes import environment


def test_outputs_and_gradients_are_those_of_torch() -> None:
    """Norm, SwiGLU and rotary embedding, in fp32: nothing but rounding differs."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang.interpreted_kernels"],
        cwd=Path(__file__).parents[2], env={**environment(), "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: len(differences) for name, differences in found.items()} == {
        "rms_norm": 2, "swiglu": 3, "rotary of 16, 1 rows of angles": 4, "rotary of 16, 2 rows of angles": 4,
        "rotary of 20, 1 rows of angles": 4,
    }  # fmt: skip
    assert max(difference for differences in found.values() for difference in differences) < 1e-6, found


@pytest.mark.parametrize("angles", [(1, 5, 8), (3, 5, 16), (1, 4, 16)])
def test_angles_that_do_not_fit_are_refused(angles: tuple[int, int, int]) -> None:
    """Of half a head, of other rows, of fewer tokens: the kernel would read beyond their end."""
    queries, keys = (torch.zeros(2, heads, 5, 16) for heads in (4, 2))
    with pytest.raises(ValueError, match=r"cannot be turned by angles .*: expected \(1, 5, 16\) or \(2, 5, 16\)"):
        layer_kernels.rotary(queries, keys, torch.zeros(angles), torch.zeros(angles))
