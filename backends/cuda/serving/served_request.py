"""A request in SGLang's scheduler, and how it gets there without a tokenizer process."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Served:
    """A request in the decoder: ``index`` is the caller's, ``tokens`` grow as they are produced.

    ``last_token_ms``: when it got the token from which it waits to join the batch, again where it was sent back.
    """

    index: int
    request: Any
    last_token_ms: float | None = None
    preemptions: int = 0

    @property
    def emitted(self) -> int:
        """How many tokens were produced so far."""
        return len(self.request.output_ids)

    @property
    def tokens(self) -> list[int]:
        """Token ids produced so far."""
        return list(self.request.output_ids)


def tokenized(name: str, prompt: Sequence[int], output_tokens: int) -> Any:
    """As from SGLang's tokenizer process: greedy, ``output_tokens`` tokens, the end-of-sequence token notwithstanding."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=name, input_text=None, input_ids=array("q", prompt), input_embeds=None, mm_inputs=None, token_type_ids=None,
        sampling_params=sampling, return_logprob=False, logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None,
        stream=False,
    )  # fmt: skip
