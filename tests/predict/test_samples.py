"""Parsing of measured samples: what is accepted, and that every refusal names its line."""

from __future__ import annotations

import json

import pytest

from harli_core.errors import SampleError
from harli_core.predict.samples import Colocated, parse_samples
from harli_core.types import Split

DEVICE = {
    "kind": "device", "gpu": "G", "sms": 8, "driver": 1, "torch": "2", "model": "m", "layers": 2,
    "splits": [[2, 6], [4, 4]],
}  # fmt: skip
SOLO = {"kind": "decode_solo", "batch": 4, "context": 16, "sm": 2, "sm_count_target": False, "ms": [1.5, 1.25]}
COLOCATED = {
    "kind": "colocated", "finetune_model": "f", "ft_tokens": 8, "batch": 1, "context": 2, "sm_infer": 4, "sm_ft": 4,
    "sm_count_target": True, "decode_solo_ms": 1.0, "decode_ms": [1.2], "unit_pair_solo_ms": 2.0, "unit_pair_ms": 2.5,
}  # fmt: skip
PREFILL = {"kind": "prefill", "tokens": 3, "sm": 8, "ms": [1]}


def lines(*records: object) -> list[str]:
    """The records as lines of JSON."""
    return [json.dumps(record) + "\n" for record in records]


def test_keeps_raw_repeats_and_order() -> None:
    """Every kind lands in its tuple, with all repeats."""
    samples = parse_samples(lines(DEVICE, SOLO, COLOCATED, PREFILL), "s.jsonl")
    assert samples.device is not None
    assert samples.device.splits == (Split(2, 6), Split(4, 4))
    assert samples.decode_solo[0].ms == (1.5, 1.25)
    assert samples.colocated[0].split == Split(4, 4)
    assert samples.prefill[0].ms == (1.0,)
    assert samples.sources[0].lines == 4
    assert samples.device.graph_batches == ()


def test_sizes_of_decode_graphs_may_be_named() -> None:
    """Sorted, each once; else the device line is refused."""
    device = parse_samples(lines({**DEVICE, "graph_batches": [1, 8, 64]}), "s.jsonl").device
    assert device is not None
    assert device.graph_batches == (1, 8, 64)
    for wrong in ([8, 1], [8, 8], [0, 8], [10**400], "8"):
        with pytest.raises(SampleError, match=r"s\.jsonl, line 1: field 'graph_batches'"):
            parse_samples(lines({**DEVICE, "graph_batches": wrong}), "s.jsonl")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**SOLO, "kind": "magic"}, "field 'kind': expected one of"),
        ({**SOLO, "extra": 1}, "unknown field 'extra'"),
        ({k: v for k, v in SOLO.items() if k != "sm"}, "field 'sm' is missing"),
        ({**SOLO, "batch": 0}, "field 'batch': expected a whole number >= 1, found 0"),
        ({**SOLO, "batch": True}, "field 'batch': expected a whole number"),
        ({**SOLO, "context": 2.0}, "field 'context': expected a whole number"),
        ({**SOLO, "sm_count_target": 1}, "field 'sm_count_target': expected true or false"),
        ({**SOLO, "ms": []}, "field 'ms': expected a list, not empty"),
        ({**SOLO, "ms": [1.0, -2.0]}, "field 'ms': expected a list, not empty"),
        ({**SOLO, "ms": [1.0, float("nan")]}, "field 'ms': expected a list of finite numbers"),
        ({**SOLO, "ms": 1.0}, "field 'ms': expected a list"),
        ({**SOLO, "sm": 3}, "measured on SMs that no split"),
        ({**COLOCATED, "sm_ft": 6}, "measured on SMs that no split"),
        ({**COLOCATED, "decode_solo_ms": 0}, "field 'decode_solo_ms': expected a number > 0"),
        ({**PREFILL, "sm": 9}, "measured on SMs that no split"),
        ({"kind": "decode_sequence", "batch": 1, "context": 1, "sm_infer": 4, "sm_ft": 4, "ms": [1]}, "field 'sm_ft'"),
        (
            {"kind": "decode_sequence", "batch": 1, "context": 1, "sm_infer": 3, "sm_ft": 0, "ms": [1]},
            "measured on SMs",
        ),
        ({**SOLO, "ms": [1.0, 1e300]}, "field 'ms': expected a list of numbers from 0.0001 to 1e+06"),
        ({**PREFILL, "ms": [1e-300]}, "field 'ms': expected a list of numbers from 0.0001 to 1e+06"),
        ({**COLOCATED, "decode_ms": [1e300]}, "field 'decode_ms': expected a list of numbers from 0.0001"),
        ({**COLOCATED, "unit_pair_ms": 1e300}, "field 'unit_pair_ms': expected a number from 0.0001 to 1e+06"),
        ({**SOLO, "ms": [10**400]}, "field 'ms': expected a list of finite numbers"),
        ({**COLOCATED, "decode_solo_ms": 10**400}, "field 'decode_solo_ms': expected a finite number"),
        ({**PREFILL, "tokens": 10**400}, "field 'tokens': expected a whole number <= 9223372036854775807"),
        (DEVICE, "a second 'device' line"),
        ([1], "expected an object, found [1]"),
    ],
)
def test_refusals_name_source_and_line(record: object, message: str) -> None:
    """A bad third line is reported as such, with the field and what would be right."""
    with pytest.raises(SampleError) as caught:
        parse_samples(lines(DEVICE, SOLO, record), "s.jsonl")
    assert str(caught.value).startswith("s.jsonl, line 3: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("line", ["\n", "{", "{} {}", "[" * 100_000])
def test_lines_that_are_not_json_are_refused(line: str) -> None:
    """A blank or broken line is not skipped."""
    with pytest.raises(SampleError, match="s, line 2: not a line of JSON"):
        parse_samples([*lines(DEVICE), line], "s")


def test_empty_input_is_refused() -> None:
    """A file without samples is an error, not an empty result."""
    with pytest.raises(SampleError, match="no samples in it"):
        parse_samples([], "s")


def test_merging_keeps_one_device() -> None:
    """Prefill samples of a second file join those of the first; two devices do not."""
    points = parse_samples(lines(DEVICE, SOLO), "a")
    merged = points.merged(parse_samples(lines(PREFILL), "b"))
    assert merged.device == points.device
    assert (len(merged.decode_solo), len(merged.prefill), len(merged.sources)) == (1, 1, 2)
    with pytest.raises(SampleError, match="a and a: both carry a 'device' line"):
        points.merged(points)


def co_run(*decode_ms: float) -> Colocated:
    """A co-run of a step that takes 40 ms alone."""
    return Colocated("f", 1024, 128, 1024, Split(20, 112), False, 40.0, decode_ms, 3.0, 3.2)


def test_steps_after_finetuning_ran_out_do_not_count() -> None:
    """Repeats that fell back to the solo time are left out of the slowdown."""
    assert co_run(51.0, 51.5, 50.0, 45.0, 40.5).overlapped_ms == (51.0, 51.5, 50.0)
    assert co_run(51.0, 51.5, 50.0, 45.0, 40.5).slowdown == pytest.approx(51.0 / 40.0)


def test_steady_and_rising_repeats_all_count() -> None:
    """Slow first repeats and noise are kept, and so is everything short enough to have been covered."""
    assert co_run(47.0, 51.0, 50.0, 50.5).overlapped_ms == (47.0, 51.0, 50.0, 50.5)
    assert co_run(51.0, 40.0).overlapped_ms == (51.0, 40.0)
