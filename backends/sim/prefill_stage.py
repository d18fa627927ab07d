"""The prefill GPUs of a disaggregated deployment: one queue, whole prompts, one at a time a GPU."""

from __future__ import annotations

from collections.abc import Callable, Generator

import simpy

from backends.sim.request import SimRequest


class PrefillStage:
    """``gpus`` servers on one first-come-first-served queue; hands each request on when its prompt is computed.

    A preempted request comes back here: its context is computed again, from the prompt and what it had produced.
    """

    def __init__(
        self,
        env: simpy.Environment,
        gpus: int,
        prefill_ms: Callable[[int], float],
        done: Callable[[SimRequest], None],
    ) -> None:
        """``prefill_ms`` gives the duration for a number of tokens; ``done`` takes the request afterwards."""
        self._env = env
        self._queue = simpy.Store(env)
        self._prefill_ms = prefill_ms
        self._done = done
        self.busy_ms = 0.0
        for _ in range(gpus):
            env.process(self._serve())

    def submit(self, request: SimRequest) -> None:
        """Queue a request."""
        self._queue.put(request)

    def _serve(self) -> Generator[simpy.Event, SimRequest, None]:
        while True:
            request = yield self._queue.get()
            duration_ms = self._prefill_ms(request.kv_tokens)
            yield self._env.timeout(duration_ms)
            self.busy_ms += duration_ms
            self._done(request)
