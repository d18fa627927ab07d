"""The public comma-separated traces, and our own."""

from __future__ import annotations

from collections.abc import Mapping

from traces.cells import hashes, just, seconds, stamp, text, whole
from traces.tables import ZONE, Column, Table

_AZURE = (Column("TIMESTAMP", stamp(b"")), Column("ContextTokens", whole(1)), Column("GeneratedTokens", whole(1)))

_VIDUR_EXTRAS = (
    Column("num_total_tokens", whole(0), optional=True),
    Column("pd_ratio", seconds(optional=True), optional=True),
)
_VIDUR_LENGTHS = (Column("num_prefill_tokens", whole(1)), Column("num_decode_tokens", whole(1)))

OWN = Table(
    columns=(
        Column("arrival_s", seconds()),
        Column("prompt_tokens", whole(1)),
        Column("output_tokens", whole(1)),
        Column("session", text(), optional=True),
        Column("request_class", text(), optional=True),
        Column("prefix_hashes", hashes(), optional=True),
    ),
    arrival="arrival_s",
    prompt="prompt_tokens",
    output="output_tokens",
    session="session",
    request_class="request_class",
    hashes="prefix_hashes",
)
"""What ``harli trace convert`` and ``generate`` write: seconds from the first request."""

TABLES: Mapping[str, Table] = {
    # Azure/AzurePublicDataset 2023: naive stamps
    "azure-2023": Table(_AZURE, "TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    # the same columns in 2024, stamps with a zone
    "azure-2024": Table(_AZURE, "TIMESTAMP", "ContextTokens", "GeneratedTokens", zone=ZONE),
    # with images, either stamp; the number of images is checked and not used
    "azure-multimodal": Table(
        (_AZURE[0], Column("NumImages", whole(0)), *_AZURE[1:]),
        "TIMESTAMP",
        "ContextTokens",
        "GeneratedTokens",
        zone=None,
    ),
    # microsoft/vidur: seconds
    "vidur": Table(
        (Column("arrived_at", seconds()), *_VIDUR_LENGTHS, *_VIDUR_EXTRAS),
        "arrived_at",
        "num_prefill_tokens",
        "num_decode_tokens",
    ),
    # its files without arrivals: they need a rate
    "vidur-lengths": Table((*_VIDUR_LENGTHS, *_VIDUR_EXTRAS), None, "num_prefill_tokens", "num_decode_tokens"),
    # Mutinifni/splitwise-sim: seconds; a row is one request
    "splitwise-sim": Table(
        (
            Column("request_id", whole(0)),
            Column("request_type", text()),
            Column("application_id", whole(0)),
            Column("arrival_timestamp", seconds()),
            Column("batch_size", just(b"1", "is a batch that cannot be replayed as one request")),
            Column("prompt_size", whole(1)),
            Column("token_size", whole(1)),
        ),
        "arrival_timestamp",
        "prompt_size",
        "token_size",
        request_class="request_type",
    ),
    # HPMLL/BurstGPT: seconds from midnight of the first day; 0 response tokens where the service failed
    "burstgpt": Table(
        (
            Column("Timestamp", seconds()),
            Column("Session ID", text(), optional=True),
            Column("Elapsed time", seconds(optional=True), optional=True),
            Column("Model", text()),
            Column("Request tokens", whole(1)),
            Column("Response tokens", whole(0)),
            Column("Total tokens", whole(0)),
            Column("Log Type", text()),
        ),
        "Timestamp",
        "Request tokens",
        "Response tokens",
        session="Session ID",
        request_class="Model",
        failed="Response tokens",
        total=("Total tokens", "Request tokens", "Response tokens"),
    ),
    "harli-csv": OWN,
}
