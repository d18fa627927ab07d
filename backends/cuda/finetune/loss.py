"""Head and loss over a large vocabulary, a chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def chunked_loss(
    head: Callable[[Any], Any],
    hidden: Any,
    targets: Any,
    trained_tokens: int,
    chunk_tokens: int,
    parameters: Sequence[Any],
) -> tuple[Any, Any, list[Any]]:
    """Cross entropy of ``head(hidden)`` against ``targets``, summed and divided by ``trained_tokens``, and its gradients.

    ``hidden`` is ``[tokens, width]`` and ``head`` works token by token (norm, then projection), so chunks are independent
    and the logits of at most ``chunk_tokens`` tokens exist at once. The softmax is in fp32 at least, as transformers has it.
    Returns the loss, its gradient by ``hidden``, and by each of ``parameters``.
    """
    import torch

    wide = torch.promote_types(hidden.dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    by_hidden = torch.empty_like(hidden)
    by_parameter = [torch.zeros_like(parameter) for parameter in parameters]
    chunks = -(-len(hidden) // chunk_tokens)  # of equal length: a short one uses the chip badly
    for chunk in range(chunks):
        here = slice(len(hidden) * chunk // chunks, len(hidden) * (chunk + 1) // chunks)
        rows = hidden[here].detach().requires_grad_()
        with torch.enable_grad():
            logits = head(rows)
        with torch.no_grad():
            wanted = targets[here, None]
            log_probabilities = torch.log_softmax(logits, -1, dtype=wide)
            chosen = log_probabilities.gather(1, wanted)
            loss -= chosen.sum()
            # Passes over the logits take as long as the products: rounded as it is computed, over the logits themselves,
            # which nothing needs any more. Divided before the norm's backward, which is fp32 in a model of any type, so
            # that it rounds what a plain loop rounds.
            by_logits = torch.exp(log_probabilities, out=logits.detach())
            del log_probabilities
            by_logits.scatter_(1, wanted, (chosen.exp() - 1.0).to(by_logits.dtype)).div_(trained_tokens)
        by_rows, *rest = torch.autograd.grad(logits, [rows, *parameters], by_logits)
        del logits, by_logits  # before the next chunk has its own
        by_hidden[here] = by_rows
        for total, part in zip(by_parameter, rest, strict=True):
            total.add_(part)
    return loss / trained_tokens, by_hidden, by_parameter
