"""The device model gives back what was measured, and counts what was not."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.sim.device_model import WARM_UP_STEPS, DeviceModel
from harli_core.errors import SampleError
from harli_core.predict.predictor import StepPredictor
from harli_core.predict.profile import Profile
from harli_core.predict.samples import Samples
from harli_core.types import Split

RING = 750
"""Steps of the recorded solo sequence after warm-up: its median ratio is 1."""


def decode_ms(
    device: DeviceModel, batch: int, kv_tokens: int, sms: int, beside: Split | None = None, step: int = 0
) -> float:
    """One step of instance 0."""
    return device.at(sms, beside, batch).decode_ms(0, step, kv_tokens, 1)[0]


def test_solo_steps_take_what_was_measured(device: DeviceModel, samples: Samples) -> None:
    """At every measured point, on every partition, the median over the whole recording is the measured median."""
    grouped: dict[tuple[int, int, int], list[float]] = {}
    for point in samples.decode_solo:
        grouped.setdefault((point.batch, point.context_tokens, point.sms), []).append(median(point.ms))
    solo = next(sequence.ms for sequence in samples.sequences if sequence.finetune_sms == 0)
    assert len(solo) - WARM_UP_STEPS == RING
    level = median(decode_ms(device, 8, 8192, 132, step=step) for step in range(RING)) / decode_ms(device, 8, 8192, 132)
    for (batch, context, sms), measured_ms in grouped.items():
        assert decode_ms(device, batch, batch * context, sms) * level == pytest.approx(median(measured_ms), rel=1e-9)


def test_a_batch_takes_what_the_graph_takes_that_it_runs(device: DeviceModel, samples: Samples) -> None:
    """With decode graphs of 8 and 64 requests, 9 requests take as long as 64 with as many KV tokens, alone and beside."""
    assert samples.device is not None
    padded = _device(dataclasses.replace(samples, device=dataclasses.replace(samples.device, graph_batches=(8, 64))))
    split = device.capabilities.splits[2]
    for batch, launched in ((3, 8), (9, 64), (64, 64), (80, 80)):
        for beside in (None, split):
            found_ms = decode_ms(padded, batch, 70_000, split.decode_sms, beside)
            assert found_ms == decode_ms(device, launched, 70_000, split.decode_sms, beside)


def test_shared_steps_are_slower_by_what_was_measured(device: DeviceModel, samples: Samples) -> None:
    """Between two measured points of one split, the ratio is that of solo time times slowdown."""
    checked = 0
    for split in device.capabilities.splits:
        points: dict[tuple[int, int], list[float]] = {}
        for point in samples.colocated:
            if point.split == split and point.finetune_model == "llama3-8b" and point.finetune_tokens == 1024:
                points.setdefault((point.batch, point.context_tokens), []).append(point.slowdown)
        nominal = {
            at: decode_ms(device, at[0], at[0] * at[1], split.decode_sms) * median(found)
            for at, found in points.items()
        }
        first = next(iter(nominal))
        unit = decode_ms(device, first[0], first[0] * first[1], split.decode_sms, split) / nominal[first]
        for (batch, context), expected_ms in nominal.items():
            found_ms = decode_ms(device, batch, batch * context, split.decode_sms, split)
            assert found_ms == pytest.approx(expected_ms * unit, rel=1e-9)
            checked += 1
    assert checked >= 7


@given(batch=st.integers(1, 300), context=st.integers(64, 8000), step=st.integers(0, 2000), index=st.integers(0, 6))
@settings(deadline=None, max_examples=30)
def test_finetuning_beside_decode_never_helps_it(
    samples: Samples, batch: int, context: int, step: int, index: int
) -> None:
    """On the same partition and at any batch, a typical step beside finetuning takes longer than a typical one alone."""
    device = _device(samples)
    split = device.capabilities.splits[index]
    alone, beside = (
        median(decode_ms(device, batch, batch * context, split.decode_sms, other, at) for at in range(0, RING, 10))
        for other in (None, split)
    )
    assert beside > alone
    assert device.at(split.decode_sms, split, batch).unit_slowdown > 1.0


_DEVICES: dict[int, DeviceModel] = {}


def _device(samples: Samples) -> DeviceModel:
    return _DEVICES.setdefault(0, DeviceModel(samples, "llama3-8b", 1024, seed=0))


@given(
    batch=st.integers(1, 300),
    context=st.integers(1, 8000),
    step=st.integers(0, 2000),
    count=st.integers(1, 100),
    shared=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_steps_laid_out_ahead_are_steps_one_by_one(
    samples: Samples, batch: int, context: int, step: int, count: int, shared: bool
) -> None:
    """KV grows by the batch at each step; asking for many at once gives the same floats."""
    device = _device(samples)
    split = device.capabilities.splits[4] if shared else None
    ahead = device.at(84, split, batch).decode_ms(0, step, batch * context, count)
    single = [decode_ms(device, batch, batch * (context + k), 84, split, step + k) for k in range(count)]
    assert list(ahead) == single


def test_alone_is_decode_on_the_whole_chip(device: DeviceModel) -> None:
    """What judges violations is the very step, alone: same noise, same context."""
    for step in (0, 7, 1234):
        assert device.alone_ms(0, step, 12, 9000) == decode_ms(device, 12, 9000, 132, step=step)


def test_turns_are_as_noisy_as_the_units_that_they_are_made_of(samples: Samples) -> None:
    """A tiny optimizer kernel that once took twice as long says nothing of a turn of forward and backward units."""
    noisy = tuple(
        dataclasses.replace(unit, ms=(*unit.ms, 2.0 * unit.ms[0])) if unit.unit == "optimizer" else unit
        for unit in samples.finetune_units
    )
    quiet = _device(samples).turn_noise(0, 0, 500)
    assert max(quiet) < 1.1
    assert _device(dataclasses.replace(samples, finetune_units=noisy)).turn_noise(0, 0, 500) == quiet


def test_noise_is_of_instance_and_seed(samples: Samples) -> None:
    """Two instances, or two seeds, do not see the same residuals; the same ones do."""
    first, second, other = (DeviceModel(samples, "llama3-8b", 1024, seed).at(132, None, 8) for seed in (0, 0, 1))
    span = (0, 8000, 50)
    assert first.decode_ms(0, *span) == second.decode_ms(0, *span)
    assert first.decode_ms(0, *span) != first.decode_ms(1, *span)
    assert first.decode_ms(0, *span) != other.decode_ms(0, *span)


def test_units_take_what_was_measured(device: DeviceModel, samples: Samples) -> None:
    """Every kind on every partition: the median of the repeats."""
    measured = {
        (unit.unit, unit.sms): median(unit.ms)
        for unit in samples.finetune_units
        if unit.model == "llama3-8b" and unit.tokens == 1024 and unit.unit != "optimizer"
    }
    assert len(measured) == 3 * 8
    for (kind, sms), ms in measured.items():
        assert device.unit_ms(kind, sms) == pytest.approx(ms)
    assert device.unit_ms("optimizer", 132) > 0.0


def test_a_longer_micro_batch_has_its_loss_in_chunks(samples: Samples) -> None:
    """2,048 tokens: twice the measured loss chunk, and the measured forward unit of that length."""
    longer = DeviceModel(samples, "llama3-8b", 2048, seed=0)
    shorter = DeviceModel(samples, "llama3-8b", 1024, seed=0)
    assert longer.unit_ms("head_loss", 132) == pytest.approx(2 * shorter.unit_ms("head_loss", 132))
    assert 1.5 < longer.unit_ms("forward", 132) / shorter.unit_ms("forward", 132) < 2.5


def test_unmeasured_units_are_refused(device: DeviceModel, samples: Samples) -> None:
    """SMs, lengths and models without a sample are errors, not guesses."""
    with pytest.raises(SampleError, match="'forward' unit of 1024 tokens on 60 SMs"):
        device.unit_ms("forward", 60)
    with pytest.raises(SampleError, match="gpt2"):
        DeviceModel(samples, "gpt2", 1024, seed=0)
    with pytest.raises(SampleError, match="no 'device' line"):
        DeviceModel(dataclasses.replace(samples, device=None), "llama3-8b", 1024, seed=0)


def test_every_split_can_be_simulated(device: DeviceModel, profile: Profile) -> None:
    """Policies plan on the splits of the profile; the device knows them all, on both sides."""
    assert device.capabilities.splits == profile.capabilities.splits
    for split in device.capabilities.splits:
        assert decode_ms(device, 8, 8000, split.decode_sms, split) > 0.0
        for kind in ("forward", "backward", "head_loss", "optimizer"):
            assert device.unit_ms(kind, split.finetune_sms) > 0.0


def test_fewer_sms_are_slower(device: DeviceModel) -> None:
    """Decode on 20 SMs takes longer than on 132, and so does a unit."""
    assert decode_ms(device, 32, 32_000, 20) > 1.5 * decode_ms(device, 32, 32_000, 132)
    assert device.unit_ms("forward", 16) > 3 * device.unit_ms("forward", 132)


@pytest.mark.parametrize("beside", [None, Split(84, 48)])
@pytest.mark.parametrize(
    ("batch", "context_share", "outside"),
    [(8, 1.0, set()), (8, 1.01, {"decode"}), (8, 0.0, {"decode"}), (5000, 1.0, {"decode", "colocated"})],
)
def test_extrapolation_is_counted(
    device: DeviceModel, samples: Samples, batch: int, context_share: float, beside: Split | None, outside: set[str]
) -> None:
    """Steps beyond measured batches or contexts (shares of the longest measured) are reported, the others are not."""
    longest = max(point.context_tokens for point in samples.decode_solo if (point.batch, point.sms) == (8, 84))
    device.count_steps(device.at(84, beside, batch), round(batch * longest * context_share), 7)
    counted = {"decode"} if beside is None else {"decode", "colocated"}
    assert dict(device.extrapolated) == dict.fromkeys(outside & counted, 7)
    assert dict(device.evaluated) == dict.fromkeys(counted, 7)


def test_looking_ahead_counts_nothing(device: DeviceModel) -> None:
    """Only steps that really ran are counted."""
    decode_ms(device, 5000, 5000, 132)
    assert dict(device.evaluated) == {}


def test_prefill_takes_what_was_measured(device: DeviceModel, samples: Samples) -> None:
    """At measured lengths the median; beyond them prolonged, counted, and never negative."""
    for point in samples.prefill:
        assert device.prefill_ms(point.tokens) == pytest.approx(median(point.ms))
    assert dict(device.extrapolated) == {}
    longest = max(point.tokens for point in samples.prefill)
    assert device.prefill_ms(10 * longest) > device.prefill_ms(longest)
    assert device.prefill_ms(1) >= 0.0
    assert device.extrapolated["prefill"] == 2


def test_it_is_not_the_regression(device: DeviceModel, profile: Profile) -> None:
    """The policy's predictor is wrong here and there, as on hardware: the simulator is no tautology."""
    predictor = StepPredictor(profile)
    errors = [
        abs(predictor.predict(batch, batch * 700).solo_ms[0] / decode_ms(device, batch, batch * 700, 20) - 1.0)
        for batch in range(1, 129)
    ]
    assert max(errors) > 0.02
    assert max(errors) < 0.5


def test_no_regression_library_is_imported() -> None:
    """Building and asking the device model never loads scikit-learn or the fitting code."""
    program = (
        "import sys\n"
        "from backends.sim.device_model import DeviceModel\n"
        "from harli_cli.package_data import shipped_samples\n"
        "device = DeviceModel(shipped_samples('h200', 'llama3-8b'), 'llama3-8b', 1024, 0)\n"
        "device.at(84, device.capabilities.splits[4], 8).decode_ms(0, 0, 8000, 10)\n"
        "loaded = [name for name in sys.modules if name.split('.')[0] in ('sklearn', 'scipy', 'torch')]\n"
        "loaded += [name for name in sys.modules if name in ('harli_core.predict.fit', 'harli_core.predict.predictor')]\n"
        "print(loaded)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
