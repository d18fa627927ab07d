"""What is let in before serving, and with which graph set; on a decoder that only counts."""

from __future__ import annotations

from typing import Any

import pytest

from backends.cuda.serving.decode_warm_up import OUTPUT_TOKENS, TOGETHER, warm_up_decoder


class CountingDecoder:
    """Requests are prompt lengths; each gets a token from prefill and one a step."""

    def __init__(self) -> None:
        """Nobody is there."""
        self.waiting: list[int] = []
        self.left: list[int] = []
        self.begun: list[tuple[int, tuple[int, ...], int]] = []
        self.stepped: set[int] = set()
        self._let_in: tuple[tuple[int, ...], int] | None = None

    @property
    def idle(self) -> bool:
        """Whether nobody waits or decodes."""
        return not self.waiting and not self.left

    @property
    def running(self) -> list[int]:
        """Who decodes."""
        return self.left

    def submit(self, _index: int, prompt: list[int], output_tokens: int, _now_ms: float) -> None:
        """Wait."""
        assert output_tokens == OUTPUT_TOKENS
        self.waiting.append(len(prompt))

    def admit(self, _between: Any) -> bool:
        """All who wait are let in."""
        if self.waiting:
            self._let_in = (tuple(self.waiting), len(self.left))
            self.left += [OUTPUT_TOKENS - 1] * len(self.waiting)
            self.waiting = []
        return bool(self.left)

    def take_prefilled(self, _now_ms: float) -> None:
        """Nothing to do."""

    def launch(self, group: int) -> bool:
        """A step with this graph set."""
        self.stepped.add(group)
        if self._let_in is not None:
            self.begun.append((group, *self._let_in))
            self._let_in = None
        return True

    def done(self) -> bool:
        """At once."""
        return True

    def finish(self, _now_ms: float) -> None:
        """A token for everybody."""
        self.left = [left - 1 for left in self.left if left > 1]


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_every_graph_set_runs_and_every_set_of_prompts_once_with_the_last(groups: int) -> None:
    """Each graph set begins with the first prompts alone; the others join those before them, and nothing is done twice."""
    decoder: Any = CountingDecoder()
    warm_up_decoder(decoder, groups)
    assert decoder.stepped == set(range(groups))
    assert decoder.idle
    assert [one[:2] for one in decoder.begun] == [
        *((group, TOGETHER[0]) for group in range(groups - 1)),
        *((groups - 1, lengths) for lengths in TOGETHER),
    ]
    beside = [running for _, _, running in decoder.begun]
    assert beside[:groups] == [0] * groups
    assert all(running > 0 for running in beside[groups:])
