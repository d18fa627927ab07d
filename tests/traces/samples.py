"""A small file in every format, written for the tests: six requests, the same in all of them."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ARRIVAL_S = (0.0, 0.0, 1.0, 2.5, 2.5, 4.0)
PROMPTS = (374, 91, 4085, 12, 100_000, 1)
OUTPUTS = (44, 1, 55, 1000, 7, 2)
STAMPS = tuple(
    f"2024-05-10 00:00:0{int(at_s)}" + (f".{int(at_s % 1 * 10)}00000" if at_s % 1 else "") for at_s in ARRIVAL_S
)
ROWS = range(len(ARRIVAL_S))

CSV: dict[str, dict[str, list[str]]] = {
    "azure-2023": {
        "TIMESTAMP": list(STAMPS),
        "ContextTokens": [*map(str, PROMPTS)],
        "GeneratedTokens": [*map(str, OUTPUTS)],
    },
    "azure-2024": {
        "TIMESTAMP": [f"{stamp}+00:00" for stamp in STAMPS],
        "ContextTokens": [*map(str, PROMPTS)],
        "GeneratedTokens": [*map(str, OUTPUTS)],
    },
    "azure-multimodal": {
        "TIMESTAMP": list(STAMPS),
        "NumImages": ["0", "1", "0", "12", "0", "3"],
        "ContextTokens": [*map(str, PROMPTS)],
        "GeneratedTokens": [*map(str, OUTPUTS)],
    },
    "vidur": {
        "arrived_at": [*map(str, ARRIVAL_S)],
        "num_prefill_tokens": [*map(str, PROMPTS)],
        "num_decode_tokens": [*map(str, OUTPUTS)],
    },
    "vidur-lengths": {
        "num_prefill_tokens": [*map(str, PROMPTS)],
        "num_decode_tokens": [*map(str, OUTPUTS)],
        "num_total_tokens": [str(p + o) for p, o in zip(PROMPTS, OUTPUTS, strict=True)],
        "pd_ratio": ["8.5", "91", "74.272727272727266", "0.012", "1e4", "0.5"],
    },
    "splitwise-sim": {
        "request_id": [str(row) for row in ROWS],
        "request_type": ["2"] * 6,
        "application_id": ["0"] * 6,
        "arrival_timestamp": [*map(str, ARRIVAL_S)],
        "batch_size": ["1"] * 6,
        "prompt_size": [*map(str, PROMPTS)],
        "token_size": [*map(str, OUTPUTS)],
    },
    "burstgpt": {
        "Timestamp": [*map(str, ARRIVAL_S)],
        "Model": ["ChatGPT", "GPT-4"] * 3,
        "Request tokens": [*map(str, PROMPTS)],
        "Response tokens": [*map(str, OUTPUTS)],
        "Total tokens": [str(p + o) for p, o in zip(PROMPTS, OUTPUTS, strict=True)],
        "Log Type": ["Conversation log"] * 6,
    },
    "burstgpt v1.2": {
        "Timestamp": [*map(str, ARRIVAL_S)],
        "Session ID": ["a", "", "a", "b", "", "c"],
        "Elapsed time": ["1.5", "", "2", "0", "", "3"],
        "Model": ["ChatGPT", "GPT-4"] * 3,
        "Request tokens": [*map(str, PROMPTS)],
        "Response tokens": [*map(str, OUTPUTS)],
        "Total tokens": [str(p + o) for p, o in zip(PROMPTS, OUTPUTS, strict=True)],
        "Log Type": ["API log"] * 6,
    },
    "harli-csv": {
        "arrival_s": [*map(str, ARRIVAL_S)],
        "prompt_tokens": [*map(str, PROMPTS)],
        "output_tokens": [*map(str, OUTPUTS)],
        "session": ["a", "", "a", "b", "", "c"],
        "request_class": ["chat"] * 6,
        "prefix_hashes": ["1 2", "", "1 2 3", "9", "", "0"],
    },
}
"""Columns by format; the name before a blank is the format's."""

JSON: dict[str, list[dict[str, Any]]] = {
    "mooncake": [
        {"timestamp": int(a * 1000), "input_length": p, "output_length": o, "hash_ids": [0, row]}
        for row, a, p, o in zip(ROWS, ARRIVAL_S, PROMPTS, OUTPUTS, strict=True)
    ],
    "aiperf": [
        {"timestamp": a * 1000, "session_id": f"s{row % 2}", "input_length": p, "output_length": o, "hash_ids": [row]}
        for row, a, p, o in zip(ROWS, ARRIVAL_S, PROMPTS, OUTPUTS, strict=True)
    ],
    "bailian": [
        {
            "chat_id": row + 1, "parent_chat_id": row if row in (1, 2) else -1, "timestamp": a, "input_length": p,
            "output_length": o, "type": "text", "turn": 1, "hash_ids": [row],
        }
        for row, a, p, o in zip(ROWS, ARRIVAL_S, PROMPTS, OUTPUTS, strict=True)
    ],
    "llmservingsim": [
        {"arrival_time_ns": int(a * 1e9), "input_toks": p, "output_toks": o, "input_tok_ids": [1, 2]}
        for a, p, o in zip(ARRIVAL_S, PROMPTS, OUTPUTS, strict=True)
    ],
    "llmservingsim-agentic": [
        {
            "session_id": f"task-{row}", "arrival_time_ns": int(a * 1e9),
            "sub_requests": [{"input_toks": p, "output_toks": o, "tool_duration_ns": 0}],
        }
        for row, a, p, o in zip(ROWS, ARRIVAL_S, PROMPTS, OUTPUTS, strict=True)
    ],
}  # fmt: skip
"""Records by format."""


def csv_bytes(columns: dict[str, list[str]]) -> bytes:
    """A header and a line a row."""
    rows = zip(*columns.values(), strict=True)
    return "".join(",".join(row) + "\n" for row in ([*columns], *rows)).encode("utf-8", "surrogatepass")


def json_bytes(records: list[Any]) -> bytes:
    """A record a line."""
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def parquet_bytes(**changed: Any) -> bytes:
    """Our own Parquet, some columns replaced."""
    columns = {"arrival_s": ARRIVAL_S, "prompt_tokens": PROMPTS, "output_tokens": OUTPUTS}
    file = io.BytesIO()
    pq.write_table(pa.table({name: pa.array(values) for name, values in (columns | changed).items()}), file)
    return file.getvalue()


FILES: dict[str, bytes] = {
    **{name: csv_bytes(columns) for name, columns in CSV.items()},
    **{name: json_bytes(records) for name, records in JSON.items()},
    "harli-parquet": parquet_bytes(),
}
"""Bytes by format."""


def rate_for(name: str) -> float | None:
    """The rate that a format needs."""
    return 2.0 if name == "vidur-lengths" else None
