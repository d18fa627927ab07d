"""The adapter: attached to a model by stock PEFT, written as PEFT's own directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.cuda.finetune.durable import write_durably
from backends.cuda.finetune.submodel import ADAPTER
from harli_core.errors import JobError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def attach(model: Any, config: Any, *, on_meta: bool = False) -> Any:
    """The PEFT model of ``model`` under the `LoraConfig` ``config``; raises `JobError` for targets that match nothing.

    ``on_meta``: the adapter has shapes only, for weights that come later.
    """
    import peft

    if not isinstance(config, peft.LoraConfig):
        raise JobError(f"the adapter must be a LoraConfig, not {type(config).__name__}")
    named = sorted({name.rpartition(".")[2] for name, part in model.named_modules() if _takes_lora(part)})
    targets = config.target_modules
    for target in targets if isinstance(targets, (set, list, tuple)) else ():
        if not any(name == target or name.endswith(f".{target}") for name, _ in model.named_modules()):
            raise JobError(f"lora_target {target!r} matches no module of the model; there are {', '.join(named)}")
    try:
        return peft.get_peft_model(model, config, ADAPTER, low_cpu_mem_usage=on_meta)
    except ValueError as error:
        fault = " ".join(str(error).split())
        raise JobError(f"PEFT refuses this adapter: {fault} (modules of the model: {', '.join(named)})") from None


def adapter_tensors(peft_model: Any, masters: Mapping[str, Any]) -> dict[str, Any]:
    """What `PeftModel.save_pretrained` would write, from master values by full parameter name."""
    import peft

    kept: dict[str, Any] = peft.get_peft_model_state_dict(
        peft_model, state_dict=dict(masters), adapter_name=ADAPTER, save_embedding_layers=False
    )
    return {name: tensor.detach().cpu().contiguous() for name, tensor in kept.items()}


def write_adapter(folder: Path, peft_model: Any, masters: Mapping[str, Any]) -> None:
    """Write the adapter directory that `PeftModel.from_pretrained` loads: configuration first, each file at once.

    Raises `OSError`.
    """
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / CONFIG, config_bytes(peft_model))
    write_durably(folder / WEIGHTS, save(adapter_tensors(peft_model, masters), metadata={"format": "pt"}))


def publish_adapter(checkpoint: Path, folder: Path) -> None:
    """Copy the adapter that lies in ``checkpoint`` into ``folder``, as `write_adapter` would write it. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, WEIGHTS):
        write_durably(folder / name, (checkpoint / name).read_bytes())


def config_bytes(peft_model: Any) -> bytes:
    """``adapter_config.json`` as PEFT writes it."""
    import json

    config = peft_model.peft_config[ADAPTER]
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    values["inference_mode"] = True
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


def _takes_lora(module: Any) -> bool:
    import torch

    return isinstance(module, (torch.nn.Linear, torch.nn.Embedding))
