"""The kernels between a layer's products, on a CPU: Triton interprets them, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
        "rms_norm": 2, "swiglu": 3, "rotary, 1 rows of angles": 4, "rotary, 2 rows of angles": 4,
    }  # fmt: skip
    assert max(difference for differences in found.values() for difference in differences) < 1e-6, found
