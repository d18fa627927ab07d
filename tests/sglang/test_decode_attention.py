"""How SGLang's decode attention is launched on a Hopper GPU: its own call, with our parameters where they fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention import decode_attention as of_sglang

from backends.cuda.serving import decode_attention
from backends.cuda.serving.decode_attention import HOPPER, KERNEL, TILE, DecodeKernel

SGLANGS = {"BLOCK_N": 32, "num_warps": 4, "num_stages": 2}


class Launches:
    """Stands for the Triton function, which needs a GPU: keeps what it is launched with."""

    def __init__(self) -> None:
        """None yet."""
        self.options: list[dict[str, Any]] = []
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """As Triton functions are launched."""
        self.grids.append(grid)
        return lambda *_arguments, **options: self.options.append(options)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What reaches SGLang's kernel; its module is as it was afterwards."""
    kept = Launches()
    monkeypatch.setattr(of_sglang, KERNEL, kept)
    return kept


def attend(head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, **more: Any) -> None:
    """SGLang's own call for three requests of eight query heads and two of KV."""
    query = torch.zeros(3, 8, head_dim, dtype=dtype)
    keys, values = (torch.zeros(16, 2, head_dim, dtype=dtype) for _ in range(2))
    parts, weights = torch.zeros(3, 8, 4, head_dim), torch.zeros(3, 8, 4)
    ends, slots, splits = torch.tensor([0, 4, 8, 12]), torch.arange(12), torch.ones(3, dtype=torch.int32)
    of_sglang._decode_grouped_att_m_fwd(query, keys, values, parts, weights, ends, slots, splits, 4, 0.1, 0.0, **more)


def test_sglangs_launch_gets_our_parameters_and_nothing_else_changes(launches: Launches) -> None:
    """The same grid and arguments as before; registered twice, the kernel is still replaced once."""
    attend()
    assert decode_attention.register(HOPPER)
    assert decode_attention.register(HOPPER)
    attend()
    plain, ours = launches.options
    assert {name: plain[name] for name in TILE} == SGLANGS
    assert {name: ours[name] for name in TILE} == TILE
    assert {**ours, **SGLANGS} == plain
    assert launches.grids == [(3, 2, 4), (3, 2, 4)]
    assert getattr(of_sglang, KERNEL).replaces is launches


@pytest.mark.parametrize(
    ("given", "options"),
    [({"head_dim": 64}, {}), ({"dtype": torch.float32}, {}), ({"head_dim": 256}, {}), ({}, {"has_mla": True})],
)
def test_other_attention_is_launched_as_sglang_does(
    launches: Launches, given: dict[str, Any], options: dict[str, Any]
) -> None:
    """Other heads, other types, latent attention: nobody measured those."""
    decode_attention.register(HOPPER)
    attend(**given, **options)
    assert {name: launches.options[0][name] for name in TILE} == SGLANGS


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (10, 0)])
def test_other_gpus_keep_sglangs_parameters(launches: Launches, capability: tuple[int, int] | None) -> None:
    """Shared memory differs from GPU to GPU: too large a tile would not launch."""
    assert not decode_attention.register(capability)
    assert getattr(of_sglang, KERNEL) is launches


def test_the_kernel_is_there_in_this_sglang() -> None:
    """Its name is SGLang's own matter and may change with a version."""
    kernel = getattr(of_sglang, KERNEL)
    assert {"BLOCK_N", "BLOCK_DMODEL", "BLOCK_DPE", "HAS_MLA", "SCORE_MOD"} <= set(
        getattr(kernel, "replaces", kernel).arg_names
    )
    assert not isinstance(kernel, DecodeKernel)
