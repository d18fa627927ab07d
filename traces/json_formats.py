"""The public JSON-lines traces: which keys each has, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from traces.json_lines import JsonLines
from traces.json_records import (
    Record,
    RecordFaultError,
    Request,
    check_keys,
    label,
    prefix_hashes,
    real_time,
    tokens,
    whole_time,
)

_LENGTHS = frozenset({"input_length", "output_length"})
_MOONCAKE = frozenset({"timestamp", "hash_ids"}) | _LENGTHS
_AIPERF = _MOONCAKE | {
    "session_id", "delay", "text_input", "messages", "message_mode", "tools", "extra", "payload", "priority",
}  # fmt: skip
_BAILIAN = _MOONCAKE | {"chat_id", "parent_chat_id", "type", "turn"}
_FLAT = frozenset({"input_toks", "output_toks", "arrival_time_ns", "input_tok_ids", "output_tok_ids"})
_SESSION = frozenset({"session_id", "arrival_time_ns", "sub_requests"})
_CALL = frozenset({"input_toks", "output_toks", "tool_duration_ns", "input_tok_ids", "output_tok_ids"})
_NS_PER_S = 1_000_000_000


def read_mooncake(record: Record, _state: dict[str, Any]) -> list[Request]:
    """``kvcache-ai/Mooncake``: whole milliseconds, many requests a tick, hashes of blocks of 512 tokens."""
    check_keys(record, _MOONCAKE)
    return [
        Request(
            whole_time(record, "timestamp", 1000),
            tokens(record, "input_length"),
            tokens(record, "output_length"),
            prefix_hashes=prefix_hashes(record),
        )
    ]


def read_aiperf(record: Record, state: dict[str, Any]) -> list[Request]:
    """``ai-dynamo/aiperf``: like Mooncake, with sessions, milliseconds that need not be whole, and delays.

    A turn with a ``delay`` instead of a ``timestamp`` comes that long after the answer to the one before it, which
    the file does not know: it is taken to arrive ``delay`` after the one before it arrived.
    """
    check_keys(record, _AIPERF)
    session = label(record, "session_id")
    derived = "timestamp" not in record and "delay" in record
    if derived:
        if session is None or session not in state:
            raise RecordFaultError("delay", "there is no earlier turn of its session; expected a timestamp")
        arrival = state[session] + real_time(record, "delay", 1000)
        if arrival >= 1e13:
            raise RecordFaultError("delay", "adds up to a time that is too large; expected under 1e13 ms")
    else:
        arrival = real_time(record, "timestamp", 1000)
    request = Request(
        arrival,
        tokens(record, "input_length"),
        tokens(record, "output_length"),
        session,
        prefix_hashes=prefix_hashes(record),
        derived=derived,
    )
    if session is not None:
        state[session] = arrival
    return [request]


def read_bailian(record: Record, state: dict[str, Any]) -> list[Request]:
    """``alibaba-edu/qwen-bailian-usagetraces-anon``: seconds; a chat's parents (-1: none) make a session."""
    check_keys(record, _BAILIAN)
    chat, parent = _whole(record, "chat_id"), _whole(record, "parent_chat_id", least=-1)
    _whole(record, "turn", least=0)
    session = str(chat) if parent == -1 else state.get(str(parent), str(parent))
    request = Request(
        real_time(record, "timestamp", 1),
        tokens(record, "input_length"),
        tokens(record, "output_length"),
        session,
        label(record, "type"),
        prefix_hashes(record),
    )
    state[str(chat)] = session
    return [request]


def read_llmservingsim(record: Record, _state: dict[str, Any]) -> list[Request]:
    """``casys-kaist/LLMServingSim``: whole nanoseconds; a line is a request, or a session of calls one after another.

    A call starts when the one before is answered and its tool has run. How long an answer takes is not in the file: a
    call is taken to arrive as long after the one before as the tool runs.
    """
    if "sub_requests" not in record:
        check_keys(record, _FLAT)
        arrival = whole_time(record, "arrival_time_ns", _NS_PER_S)
        return [Request(arrival, tokens(record, "input_toks"), tokens(record, "output_toks"))]
    check_keys(record, _SESSION)
    session, arrival = label(record, "session_id"), whole_time(record, "arrival_time_ns", _NS_PER_S)
    calls = record["sub_requests"]
    if not isinstance(calls, list) or not calls or not all(isinstance(call, dict) for call in calls):
        raise RecordFaultError("sub_requests", "is no list of calls; expected one JSON object or more in it")
    requests: list[Request] = []
    for place, call in enumerate(calls):
        try:
            check_keys(call, _CALL)
            lengths = tokens(call, "input_toks"), tokens(call, "output_toks")
            wait = whole_time(call, "tool_duration_ns", _NS_PER_S)
        except RecordFaultError as fault:
            key = f"sub_requests[{place}]" + ("" if fault.key is None else f".{fault.key}")
            raise RecordFaultError(key, fault.what) from None
        requests.append(Request(arrival, *lengths, session, derived=place > 0))
        arrival += wait
    if arrival >= 1 << 62:
        raise RecordFaultError(
            "sub_requests", "the durations add up to a time that is too large; expected under 1e18 ns"
        )
    return requests


def _whole(record: Record, key: str, least: int = 0) -> int:
    value = record.get(key)
    if type(value) is not int or not least <= value < 1 << 62:
        found = "is missing" if key not in record else f"{value!r} is wrong" if type(value) is int else "is no number"
        raise RecordFaultError(key, f"{found[:80]}; expected a whole number of {least} or more")
    return value


JSON_LINES: Mapping[str, JsonLines] = {
    "mooncake": JsonLines(
        "timestamp", 1000, ("timestamp", "input_length", "output_length", "[hash_ids]"), _MOONCAKE, read_mooncake
    ),
    "aiperf": JsonLines(
        "timestamp",
        1000,
        ("[timestamp]", "[delay]", "[session_id]", "input_length", "output_length", "[hash_ids]"),
        _AIPERF,
        read_aiperf,
        instead=_MOONCAKE,
    ),
    "bailian": JsonLines(
        "timestamp",
        1,
        ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "[type]", "turn", "[hash_ids]"),
        _BAILIAN,
        read_bailian,
    ),
    "llmservingsim": JsonLines(
        "arrival_time_ns", _NS_PER_S, ("arrival_time_ns", "input_toks", "output_toks"), _FLAT, read_llmservingsim
    ),
    "llmservingsim-agentic": JsonLines(
        "arrival_time_ns", _NS_PER_S, ("[session_id]", "arrival_time_ns", "sub_requests"), _SESSION, read_llmservingsim
    ),
}
"""Every format of JSON lines, by name. The two of LLMServingSim are one: lines of both kinds may be mixed."""
