"""With one request at a time and a constant step, an instance is an M/D/1 queue.

At 90 % load the mean of 10,000 waits is off by 15 % from one sample to the next, so comparing it with the textbook needs
millions of requests. It is done in two steps: the simulator's waits are those of a queue, one by one and exactly; and
the mean wait of that queue is the textbook's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from traces.synthetic import poisson

SERVICE_S = 0.01


def arrivals_s(load: float, seed: int, requests: int) -> NDArray[np.float64]:
    """Poisson arrivals that keep one server busy for ``load`` of the time."""
    rng = np.random.Generator(np.random.PCG64(seed))
    return poisson(rng, load / SERVICE_S, requests, 10, 1).arrival_s


def simulated_waits_s(requests_of: Any, arrival_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Waits of requests of one token each, on one instance with room for one."""
    count = len(arrival_s)
    book = requests_of(arrival_s, [10] * count, [1] * count).simulate("inference_only", max_batch=1).requests
    waits_s: NDArray[np.float64] = book.first_token_s - book.arrival_s - SERVICE_S
    return waits_s


def lindley_waits_s(arrival_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """max(0, the wait before + service - gap), all at once: how far the work is above its lowest point so far."""
    surplus_s = np.concatenate(([0.0], np.cumsum(SERVICE_S - np.diff(arrival_s))))
    return surplus_s - np.minimum.accumulate(surplus_s)


def mean_wait_s(load: float) -> float:
    """Pollaczek-Khinchine for a constant service time."""
    return load * SERVICE_S / (2 * (1 - load))


@pytest.mark.parametrize("load", [0.5, 0.7, 0.9, 1.2])
def test_each_wait_is_that_of_the_queue(load: float, requests_of: Any, constant_device: Any) -> None:
    """Not only the mean: every single wait, also above capacity."""
    arrival_s = arrivals_s(load, 1, 8000)
    with constant_device():
        found_s = simulated_waits_s(requests_of, arrival_s)
    assert np.abs(found_s - lindley_waits_s(arrival_s)).max() < 1e-9


@pytest.mark.parametrize("load", [0.5, 0.7, 0.9])
def test_such_a_queue_is_m_d_1(load: float) -> None:
    """The waits that the simulator is held to above have the mean of the textbook: 4 million requests, within 2 %."""
    means_s = [lindley_waits_s(arrivals_s(load, seed, 1_000_000)).mean() for seed in range(4)]
    assert np.mean(means_s) == pytest.approx(mean_wait_s(load), rel=0.02)
