"""Launches of units that took far longer than a launch does are kept one by one."""

from __future__ import annotations

from backends.cuda.serving.unit_times import MOST_SLOW, SLOW_MS, SlowLaunch, UnitTimes


def test_only_slow_launches_are_kept() -> None:
    """When, of what, for how long; the sums have all of them."""
    times = UnitTimes()
    times.launched("forward", 64, 10.0, 0.2)
    times.launched("backward", 112, 20.0, 225.0)
    times.launched("forward", 64, 250.0, SLOW_MS)
    assert list(times.slow) == [SlowLaunch(20.0, "backward", 112, 225.0)]
    assert times.launch["forward"].count == 2
    assert times.launch["backward"].longest_ms == 225.0


def test_the_last_slow_ones_are_kept_until_the_next_run() -> None:
    """No more than `MOST_SLOW`; `clear` begins anew."""
    times = UnitTimes()
    for count in range(MOST_SLOW + 5):
        times.launched("forward", 64, float(count), 5.0)
    assert [slow.at_ms for slow in times.slow] == [float(count) for count in range(5, MOST_SLOW + 5)]
    times.clear()
    assert not times.slow
