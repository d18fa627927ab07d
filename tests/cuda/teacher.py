"""Teacher-forced decoding: requests say given tokens whatever the model prefers, and its logits are kept or compared.

What the model sees is then the same in every run, so that logits differ only by how they were computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from backends.cuda.serving.instance import Instance


class Teacher:
    """``prompts`` and ``tokens`` by request; the first run through `forcing` is the reference for later ones."""

    def __init__(
        self, instance: Instance, prompts: Sequence[Sequence[int]], tokens: Mapping[int, Sequence[int]]
    ) -> None:
        """Nothing is recorded yet."""
        self._runner = instance.decoder.scheduler.tp_worker.model_runner
        self._prompt_tokens = [len(ids) for ids in prompts]
        self._tokens = tokens
        self._logits: dict[tuple[int, int], Any] = {}
        self._apart: list[Any] = []
        self._agree: list[Any] = []
        self._spread: list[float] = []

    @contextmanager
    def forcing(self, first: int = 0) -> Iterator[None]:
        """While this lasts, request ``n`` of a run says the tokens of request ``first + n``."""
        sample = self._runner.sample
        recorded = bool(self._logits)

        def forced(output: Any, batch: Any) -> Any:
            import torch

            chosen = sample(output, batch)
            names = [first + int(name) for name in batch.rids]
            lengths = batch.seq_lens.tolist()
            places = [(name, length - self._prompt_tokens[name]) for name, length in zip(names, lengths, strict=True)]
            logits = output.next_token_logits[: len(names)]
            if recorded:
                expected = torch.stack([self._logits[place] for place in places])
                self._apart.append((logits.float() - expected.float()).abs().amax(dim=1))
                self._agree.append(logits.argmax(dim=1) == expected.argmax(dim=1))
            else:
                self._logits.update(zip(places, logits.clone(), strict=True))
                self._spread.append(float(logits.float().std()))
            words = [self._tokens[name][index] for name, index in places]
            return torch.tensor(words, dtype=chosen.dtype, device=chosen.device)

        self._runner.sample = forced
        try:
            yield
        finally:
            self._runner.sample = sample

    def apart(self) -> dict[str, float]:
        """How far logits were from the reference since the last call: largest difference of each token's logits."""
        import torch

        apart = torch.cat(self._apart).cpu().numpy()
        agree = torch.cat(self._agree).float().mean()
        self._apart, self._agree = [], []
        mean, tail = float(apart.mean()), float(np.quantile(apart, 0.999))
        return {
            "tokens": len(apart),
            "mean": mean,
            "p99.9": tail,
            "max": float(apart.max()),
            "same_first_choice": float(agree),
            "mean_of_logits_spread": mean / float(np.mean(self._spread)),
        }
