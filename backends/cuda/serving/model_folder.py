"""Where a served model comes from: a local folder of Hugging Face, or only a shipped configuration (random weights)."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from harli_core.errors import ConfigError


def shipped_config(name: str) -> dict[str, Any]:
    """The ``config.json`` of a model that Harli knows; raises `ConfigError` for any other."""
    folder = resources.files("backends.cuda") / "data"
    known = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if name not in known:
        raise ConfigError(f"no configuration of model {name!r} ships with Harli; there are {', '.join(known)}")
    config: dict[str, Any] = json.loads((folder / name / "config.json").read_text(encoding="utf-8"))
    return config


def dummy_folder(config: dict[str, Any], context_tokens: int, folder: Path) -> Path:
    """Write a folder that ``--load-format dummy`` can load, with room for ``context_tokens`` positions."""
    folder.mkdir(parents=True, exist_ok=True)
    positions = max(context_tokens, config["max_position_embeddings"])
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}), encoding="utf-8")
    return folder


def check_folder(path: Path) -> Path:
    """A folder with ``config.json``; raises `ConfigError`."""
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path}: no config.json in it; expected a model folder as Hugging Face has it, or --load-format dummy"
        )
    return path
