"""SM partitions that only count: what a policy may rely on without a GPU."""

from __future__ import annotations

import pytest

from backends.cuda._native import HostPartitions
from harli_core.errors import ConfigError


def test_pairs_are_disjoint_and_fill_the_chip() -> None:
    """Both sides of a pair add up to all SMs; finetuning gets whole groups, decode the rest."""
    partitions = HostPartitions(132, [16, 64, 112], 8)
    assert partitions.total_sms == 132
    assert [(pair[0], pair[1]) for pair in partitions.pairs] == [(116, 16), (68, 64), (20, 112)]


def test_an_odd_count_is_rounded_up_to_a_group() -> None:
    """As the driver does: the counts that come back are what there is."""
    assert HostPartitions(132, [10], 8).pairs[0][:2] == (116, 16)


@pytest.mark.parametrize("asked", [0, 132, 130])
def test_a_side_without_sms_is_refused(asked: int) -> None:
    """Neither side may be empty; the message says what was asked of how many."""
    with pytest.raises(ConfigError, match=f"{asked} of 132 SMs"):
        HostPartitions(132, [asked], 8)
