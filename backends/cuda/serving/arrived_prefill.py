"""Prompts whose KV arrives with their first token, as from the prefill GPUs of a disaggregated deployment."""

from __future__ import annotations

from typing import Any

import numpy as np


def as_arrived(scheduler: Any, batch: Any) -> Any:
    """The result of a prefill of ``batch`` that ran elsewhere: one token each, and no work here."""
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.overlap_utils import resolve_forward_inputs
    from sglang.srt.managers.utils import GenerationBatchResult

    scheduler.forward_ct += 1
    batch.forward_iter = scheduler.forward_ct
    resolve_forward_inputs(batch, scheduler.future_map)
    last = torch.from_numpy(np.asarray(np.cumsum(batch.extend_lens) - 1, dtype=np.int64))
    tokens = batch.input_ids[last.to(scheduler.device, non_blocking=True)]  # any token will do
    result = GenerationBatchResult(logits_output=LogitsProcessorOutput(next_token_logits=None), next_token_ids=tokens)
    scheduler._relay_forward_payload(batch.req_pool_indices, result)
    batch.input_ids = None
    return result
