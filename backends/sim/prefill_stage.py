"""The prefill GPUs of a disaggregated deployment: one queue, whole prompts, one at a time a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

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
        self._idle_gpus = gpus
        self._queue: deque[SimRequest] = deque()
        self._prefill_ms = prefill_ms
        self._done = done
        self.busy_ms = 0.0

    def submit(self, request: SimRequest) -> None:
        """Start on a request, or queue it while all GPUs are busy."""
        if self._idle_gpus:
            self._idle_gpus -= 1
            self._start(request)
        else:
            self._queue.append(request)

    def _start(self, request: SimRequest) -> None:
        duration_ms = self._prefill_ms(request.kv_tokens)
        self.busy_ms += duration_ms
        finished = self._env.timeout(duration_ms)
        assert finished.callbacks is not None, "a new event takes callbacks"
        finished.callbacks.append(partial(self._finish, request))

    def _finish(self, request: SimRequest, _event: simpy.Event) -> None:
        if self._queue:
            self._start(self._queue.popleft())
        else:
            self._idle_gpus += 1
        self._done(request)
