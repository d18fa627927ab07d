"""The schema refuses columns that no request trace can have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harli_core.errors import TraceError
from traces.schema import RequestTrace


def trace(**changed: Any) -> RequestTrace:
    """Build a trace of three requests with some columns replaced."""
    columns: dict[str, Any] = {"arrival_s": [0.0, 0.5, 2.0], "prompt_tokens": [10, 20, 30], "output_tokens": [1, 2, 3]}
    return RequestTrace.of(**(columns | changed), source="a test")


def test_columns_have_the_promised_types() -> None:
    """Arrivals are float64 and tokens int64, whatever they were built from."""
    built = trace(prompt_tokens=np.array([1, 2, 3], dtype=np.uint8))
    assert [built.arrival_s.dtype, built.prompt_tokens.dtype, built.output_tokens.dtype] == [
        np.float64,
        np.int64,
        np.int64,
    ]


def test_length_and_span() -> None:
    """The length counts requests and the span reaches from the first to the last arrival."""
    assert (len(trace()), trace().span_s) == (3, 2.0)


def test_summary_is_plain_numbers() -> None:
    """The summary is ready for JSON and says what the trace asks for."""
    assert trace().summary() == {
        "source": "a test",
        "requests": 3,
        "span_s": 2.0,
        "mean_rps": 1.0,
        "prompt_tokens": 60,
        "output_tokens": 6,
        "mean_prompt_tokens": 20.0,
        "mean_output_tokens": 2.0,
        "max_prompt_tokens": 30,
        "max_output_tokens": 3,
    }


def test_summary_of_one_request_has_no_rate() -> None:
    """A span of 0 has no rate: absent, neither 0 nor infinite."""
    assert trace(arrival_s=[0.0], prompt_tokens=[1], output_tokens=[1]).summary()["mean_rps"] is None


def test_columns_are_read_only_copies() -> None:
    """Neither the caller's arrays nor the trace's own change the trace afterwards."""
    prompts = np.array([10, 20, 30])
    built = trace(prompt_tokens=prompts)
    prompts[0] = 99
    assert built.prompt_tokens[0] == 10
    with pytest.raises(ValueError, match="read-only"):
        built.prompt_tokens[0] = 1


def test_equality_looks_at_every_column_and_not_at_the_source() -> None:
    """Traces are equal exactly when all three columns are."""
    assert trace() == RequestTrace.of([0, 0.5, 2], [10, 20, 30], [1, 2, 3], source="elsewhere")
    assert trace() != trace(arrival_s=[0.0, 0.5, 2.1])
    assert trace() != trace(prompt_tokens=[10, 20, 31])
    assert trace() != trace(output_tokens=[1, 2, 4])
    assert trace() != "a trace"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"arrival_s": [0.0, 2.0, 1.0]}, "request 2, arrival_s"),
        ({"arrival_s": [0.0, float("nan"), 1.0]}, "request 1, arrival_s"),
        ({"arrival_s": [0.0, 1.0, float("inf")]}, "request 2, arrival_s"),
        ({"arrival_s": [-1.0, 0.0, 1.0]}, "request 0, arrival_s"),
        ({"arrival_s": [1.0, 2.0, 3.0]}, "request 0, arrival_s"),
        ({"prompt_tokens": [1, 0, 1]}, "request 1, prompt_tokens"),
        ({"output_tokens": [1, 1, -4]}, "request 2, output_tokens"),
        ({"output_tokens": [1.0, 1.5, 2.0]}, "output_tokens holds float64"),
        ({"prompt_tokens": [1, 2]}, r"prompt_tokens has shape \(2,\)"),
        ({"arrival_s": [], "prompt_tokens": [], "output_tokens": []}, "no requests"),
    ],
)
def test_refused_columns(changed: dict[str, Any], words: str) -> None:
    """Each impossible column is named, with the request where it goes wrong."""
    with pytest.raises(TraceError, match=words) as caught:
        trace(**changed)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("a test: ")
