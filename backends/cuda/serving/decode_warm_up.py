"""Steps and admissions before anything is served, so that no kernel is compiled and no memory looked for in a real one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from backends.cuda.serving.decoder import Decoder

TOGETHER = ((32, 32), (31,), (32,), (31, 32), (17, 31, 33), (16,) * 5, (1,) * 16)
"""Lengths of prompts that are let in together.

Triton compiles SGLang's bookkeeping anew for one request, for numbers that 16 divides, and for arguments at odd addresses.
"""

OUTPUT_TOKENS = 4
"""Enough for each set to join those before it."""


def warm_up_decoder(decoder: Decoder, groups: int) -> None:
    """Run some steps with each of the ``groups`` graph sets, and let requests in one by one and several at a time.

    That is done with the last set, which begins as the others do, with the first of `TOGETHER` and nobody else.
    """
    indices = (-index for index in count(1))
    *others, last = range(groups)
    for group in others:
        _submit(decoder, indices, TOGETHER[0])
        _run_out(decoder, group)
    for lengths in TOGETHER:
        _submit(decoder, indices, lengths)
        _step(decoder, last)
    _run_out(decoder, last)


def _submit(decoder: Decoder, indices: Iterator[int], lengths: Sequence[int]) -> None:
    for tokens in lengths:
        decoder.submit(next(indices), [1] * tokens, OUTPUT_TOKENS, 0.0)


def _run_out(decoder: Decoder, group: int) -> None:
    while not decoder.idle and _step(decoder, group):
        pass


def _step(decoder: Decoder, group: int) -> bool:
    """Admission and one step; `False` where nothing decodes."""
    if not decoder.admit(lambda: None):
        return False
    decoder.take_prefilled(0.0)
    if decoder.running and decoder.launch(group):
        while not decoder.done():
            pass
        decoder.finish(0.0)
    return True
