"""A job small enough to run in a second: a tiny model on disk, a data set, and its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.finetune.tiny import tiny_base

BYTES_VOCABULARY = 263


def small_job(folder: Path, **changes: Any) -> Path:
    """Write model, data and ``job.toml`` into ``folder``; ``changes`` go into the file (`None` takes a key out)."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not (folder / "model").exists():
        tiny_base("llama", torch.float32, vocab_size=BYTES_VOCABULARY).save_pretrained(folder / "model")
        rows = [
            {"instruction": f"count {n}", "input": "", "output": " ".join(map(str, range(n)))} for n in range(1, 14)
        ]
        (folder / "data").mkdir()
        (folder / "data" / "counts.json").write_text(json.dumps(rows))
        (folder / "data" / "dataset_info.json").write_text(json.dumps({"counts": {"file_name": "counts.json"}}))
    values: dict[str, Any] = {
        "model_name_or_path": str(folder / "model"),
        "tokenizer": "byte",
        "dataset": "counts",
        "dataset_dir": str(folder / "data"),
        "output_dir": str(folder / "out"),
        "cutoff_len": 64,
        "lora_rank": 4,
        "lora_dropout": 0.1,
        "gradient_accumulation_steps": 4,
        "learning_rate": 0.01,
        "max_steps": 6,
        "save_steps": 1,
        **changes,
    }
    path = folder / "job.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items() if value is not None))
    return path


def results(output_dir: Path) -> tuple[bytes, bytes]:
    """The loss sequence and the adapter, byte for byte."""
    return (output_dir / "trainer_log.jsonl").read_bytes(), (output_dir / "adapter_model.safetensors").read_bytes()
