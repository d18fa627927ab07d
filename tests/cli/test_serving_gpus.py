"""How many GPUs serve under `separate`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harli_cli.serving_gpus import KEPT_SHARE, fewest_serving


def _silent(_name: str, _total: int) -> Any:
    return lambda _count: None


@settings(max_examples=8, deadline=None)
@given(
    count=st.integers(1, 60),
    rate_rps=st.sampled_from([2.0, 12.0, 60.0]),
    seed=st.integers(0, 10_000),
    serving=st.integers(1, 2),
    config=st.sampled_from([{}, {"prefill_gpus": 1}, {"qos_ms": 5.0, "horizon_s": 3.21}, {"memory_gb": 29.0}]),
)
def test_they_step_as_if_no_others_were_there(
    conversation: Any, count: int, rate_rps: float, seed: int, serving: int, config: dict[str, Any]
) -> None:
    """Bit by bit like `inference_only` on as many GPUs, so that its steps need no run of their own."""
    requests = conversation(count, rate_rps, seed)
    alone = requests.simulate("inference_only", gpus=serving, **config).steps
    apart = requests.simulate("separate", {"serving_gpus": serving}, gpus=3, **config).steps
    for name in ("latency_ms", "decode_ms", "turn_ms"):
        assert getattr(apart, name).tobytes() == getattr(alone, name).tobytes()
    assert (apart.solo_violations, apart.finetune_violations) == (alone.solo_violations, alone.finetune_violations)


@pytest.mark.parametrize(("qos_ms", "serving"), [(40.0, 1), (5.6, 2), (1.0, 3)])
def test_fewest_that_keep_the_target(conversation: Any, qos_ms: float, serving: int) -> None:
    """By `inference_only` on 1, 2, .. GPUs; all where no number keeps it. The run is that of the number found."""
    requests = conversation(120, 20.0)
    kept = []
    for gpus in (1, 2, 3):
        steps = requests.simulate("inference_only", gpus=gpus, qos_ms=qos_ms).steps
        kept.append(1.0 - steps.solo_violations / len(steps) >= KEPT_SHARE)
    assert next((gpus for gpus, keeps in enumerate(kept, start=1) if keeps), 3) == serving
    found, outcome, _device = fewest_serving(requests.scenario(gpus=3, qos_ms=qos_ms), _silent)
    assert found == serving
    assert [state.hosts_job for state in outcome.instances] == [index >= serving for index in range(3)]
