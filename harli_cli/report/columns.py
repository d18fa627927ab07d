"""The columns of a result folder that its report draws from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harli_core.errors import ConfigError
from harli_core.records import RequestBook, StepBook

STEP_COLUMNS = (
    "instance", "step", "end_s", "latency_ms", "turn_ms", "batch", "decode_sms", "finetune_sms", "rows_kv", "rows_lent",
    "window_layers", "predicted_ms", "finetune_tokens",
)  # fmt: skip
REQUEST_COLUMNS = ("request", "arrival_s", "first_token_s", "last_token_s", "ttft_s", "tpot_s", "output_tokens")

Column = NDArray[Any]


@dataclass(frozen=True, slots=True)
class ResultColumns:
    """What `harli_cli.results` wrote: the summary, and columns by name (float columns have NaN for null)."""

    summary: dict[str, Any]
    steps: dict[str, Column]
    requests: dict[str, Column]


def read_result(folder: Path) -> ResultColumns:
    """Read a finished result folder; raises `ConfigError` for one that is none."""
    return ResultColumns(
        _summary(folder / "summary.json"),
        _columns(folder / "steps.parquet", STEP_COLUMNS),
        _columns(folder / "requests.parquet", REQUEST_COLUMNS),
    )


def columns_of(summary: dict[str, Any], requests: RequestBook, steps: StepBook) -> ResultColumns:
    """The same from the books of a run that just ended, without a file."""
    found: dict[str, Column] = {
        "step": steps.spread("first_step") + steps.step_within_span(),
        "end_s": steps.ends_s(),
        "latency_ms": np.frombuffer(steps.latency_ms),
        "turn_ms": np.frombuffer(steps.turn_ms),
    }
    found |= {name: steps.spread(name) for name in STEP_COLUMNS if name not in found}
    served: dict[str, Column] = {
        "request": np.arange(len(requests)),
        "ttft_s": requests.ttft_s(),
        "tpot_s": requests.tpot_s(),
        **{name: getattr(requests, name) for name in ("arrival_s", "first_token_s", "last_token_s", "output_tokens")},
    }
    return ResultColumns(summary, found, served)


def _summary(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read it ({error.strerror}); expected the folder of a finished harli run"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: not the summary of a run ({error})") from None
    if not isinstance(found, dict) or "steps" not in found or "config" not in found:
        raise ConfigError(f"{path}: not the summary of a run (no 'steps' or no 'config' in it)")
    return found


def _columns(path: Path, names: tuple[str, ...]) -> dict[str, Column]:
    import pyarrow.parquet as pq  # noqa: PLC0415  (a heavy import that only reading needs)
    from pyarrow import ArrowException  # noqa: PLC0415

    try:
        with pq.ParquetFile(path) as file:  # without the dataset machinery of `read_table`; a column at a time
            return {name: np.asarray(file.read([name], use_threads=False).column(name).to_numpy()) for name in names}
    except (OSError, ArrowException, KeyError) as error:
        raise ConfigError(f"{path}: cannot read it ({error}); expected the folder of a finished harli run") from None
