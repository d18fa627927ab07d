"""Record every tensor allocation of one LoRA finetune iteration from torch, for fragmentation.py; needs a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import backends.cuda.memory  # noqa: F401  the installed package, before the checkout's folders come into reach
import harli_cli  # noqa: F401
import harli_core  # noqa: F401
import traces  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks.* and tests.*, ahead of other packages' folders

import torch

from benchmarks.record import results_folder, write_json

LAYERS, TOKENS, HIDDEN, WIDE, HEADS, KV_HEADS, DIM, RANK = 32, 1024, 4096, 14336, 32, 8, 128, 16
MICRO_BATCHES = 2


class Layer(torch.nn.Module):  # type: ignore[misc]  # torch may be missing where this is checked
    """A LLaMA3-8B layer with LoRA on q and v; all layers share the frozen weights, which no iteration allocates."""

    def __init__(self, frozen: dict[str, Any]) -> None:
        """Make the trainable matrices."""
        super().__init__()
        self.frozen = frozen
        make = {"q_a": (RANK, HIDDEN), "q_b": (HIDDEN, RANK), "v_a": (RANK, HIDDEN), "v_b": (KV_HEADS * DIM, RANK)}
        self.lora = torch.nn.ParameterDict(
            {
                name: torch.nn.Parameter(torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 64)
                for name, shape in make.items()
            }
        )

    def norm(self, x: Any) -> Any:
        """RMS norm as Hugging Face writes it: in fp32."""
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    def forward(self, x: Any) -> Any:
        """Attention and gated MLP."""
        linear = torch.nn.functional.linear
        y = self.norm(x)
        q = linear(y, self.frozen["q"]) + linear(linear(y, self.lora["q_a"]), self.lora["q_b"])
        k = linear(y, self.frozen["k"])
        v = linear(y, self.frozen["k"]) + linear(linear(y, self.lora["v_a"]), self.lora["v_b"])
        q, k, v = (t.view(1, TOKENS, -1, DIM).transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(attended.transpose(1, 2).reshape(1, TOKENS, HIDDEN), self.frozen["q"])
        y = self.norm(x)
        gate = torch.nn.functional.silu(linear(y, self.frozen["up"]))
        return x + linear(gate * linear(y, self.frozen["up"]), self.frozen["down"])


def main() -> None:
    """Run iterations layer by layer with recompute, as the finetune units do, and write the third one's allocations."""
    shapes = {"q": (HIDDEN, HIDDEN), "k": (KV_HEADS * DIM, HIDDEN), "up": (WIDE, HIDDEN), "down": (HIDDEN, WIDE)}
    frozen = {name: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 64 for name, shape in shapes.items()}
    layers = [Layer(frozen) for _ in range(LAYERS)]
    optimizer = torch.optim.AdamW([p for layer in layers for p in layer.parameters()], lr=1e-4, foreach=False)
    for iteration in range(3):
        if iteration == 2:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=1_000_000)
        for _ in range(MICRO_BATCHES):
            x = torch.randn(1, TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
            inputs = []
            with torch.no_grad():
                for layer in layers:
                    inputs.append(x)
                    x = layer(x)
            gradient = x.float().mul(1e-3).to(x.dtype)
            del x
            for layer in reversed(layers):
                start = inputs.pop().detach().requires_grad_()
                layer(start).backward(gradient)
                gradient = start.grad
                del start
            del gradient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    live: dict[int, int] = {}
    steps: list[int] = []  # bytes of an allocation, or -(number of the allocation) - 1 for its free
    count = 0
    for entry in trace:
        if entry["action"] == "alloc":
            live[entry["addr"]] = count
            steps.append(entry["size"])
            count += 1
        elif entry["action"] == "free_completed" and entry["addr"] in live:
            steps.append(-live.pop(entry["addr"]) - 1)
    steps += [-number - 1 for number in live.values()]
    path = results_folder(__file__) / "finetune_iteration_trace.json"
    recorded = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "steps": steps}
    write_json(path, recorded, indent=None, sort_keys=False)
    print(path, count, "allocations")


if __name__ == "__main__":
    main()
