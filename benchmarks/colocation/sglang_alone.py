"""SGLang's own event loops on its own memory, fed from within this process: what Harli's loop is compared with."""

from __future__ import annotations

import gc
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from backends.cuda.serving.served_request import tokenized

if TYPE_CHECKING:
    from backends.cuda.serving.scheduler_factory import ServingSettings


class RequestsAtHand:
    """In the place of SGLang's request receiver: gives what `put` was given, and ends the loop once all of it is served.

    Sockets are not asked; Harli's loop, with arrivals from a trace, asks none either.
    """

    def __init__(self, scheduler: Any) -> None:
        """Take the place of ``scheduler``'s receiver, whose fields stay within reach."""
        self._scheduler = scheduler
        self._receiver = scheduler.request_receiver
        self._pending: list[Any] = []
        scheduler.request_receiver = self

    def __getattr__(self, name: str) -> Any:
        """SGLang's."""
        return getattr(self._receiver, name)

    def put(self, requests: list[Any]) -> None:
        """What the loop will receive, all at once."""
        self._pending.extend(requests)

    def recv_requests(self) -> list[Any]:
        """What the event loop calls before each step."""
        given, self._pending = self._pending, []
        if not given and self._scheduler.is_fully_idle():
            self._scheduler.gracefully_exit = True
        return given


class SglangAlone:
    """A scheduler of SGLang that nothing of Harli's is in; ``settings`` say which of its loops runs."""

    def __init__(self, settings: ServingSettings) -> None:
        """Load and capture."""
        from backends.cuda.serving.scheduler_factory import make_scheduler

        assert not settings.unified, "SGLang's own pool is what is measured"
        self._on_gpu = settings.device == "cuda"
        self.scheduler: Any = make_scheduler(settings, None)
        for sender in (self.scheduler.ipc_channels.send_to_detokenizer, self.scheduler.ipc_channels.send_to_tokenizer):
            if sender.socket is not None:  # nobody listens
                sender.socket.close(linger=0)
            sender.socket = None
        self._requests = RequestsAtHand(self.scheduler)
        self._ends: list[tuple[float, int]] = []  # (seconds, batch) at the end of each decode step
        self._process = self.scheduler.process_batch_result
        self.scheduler.process_batch_result = self._stamped

    @property
    def loop(self) -> str:
        """The event loop that `step_ms` runs."""
        return "event_loop_overlap" if self.scheduler.enable_overlap else "event_loop_normal"

    def settle(self) -> None:
        """What was made so far lives for good: collecting it again and again would delay steps (as `Instance.warm_up`)."""
        gc.collect()
        gc.freeze()

    def step_ms(self, batch: int, prompt_tokens: int, output_tokens: int) -> list[float]:
        """From result to result while all ``batch`` requests decode."""
        self._ends.clear()
        self._requests.put([tokenized(str(index), [7] * prompt_tokens, output_tokens) for index in range(batch)])
        self.scheduler.gracefully_exit = False
        self.scheduler.run_event_loop()
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
        full_s = [end_s for end_s, size in self._ends if size == batch]
        return [(last - first) * 1e3 for first, last in pairwise(full_s)]

    def decode_ms(self, batch: int, prompt_tokens: int, output_tokens: int) -> list[float]:
        """The same run again, with marks on the GPU: from each decode graph's begin to the end of its step's work."""
        if not self._on_gpu:
            return []
        import torch

        scheduler, marks = self.scheduler, []
        graphs = scheduler.tp_worker.model_runner.decode_cuda_graph_runner.backend
        replay, run_batch = graphs.replay, scheduler.run_batch

        def mark() -> Any:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event

        def replayed(*arguments: Any, **options: Any) -> Any:
            marks.append([mark()])
            return replay(*arguments, **options)

        def ran(*arguments: Any, **options: Any) -> Any:
            before = len(marks)
            result = run_batch(*arguments, **options)
            if len(marks) > before:
                marks[-1].append(mark())
            return result

        graphs.replay, scheduler.run_batch = replayed, ran
        try:
            self.step_ms(batch, prompt_tokens, output_tokens)
        finally:
            graphs.replay, scheduler.run_batch = replay, run_batch
        return [float(begin.elapsed_time(end)) for begin, end in marks]

    def _stamped(self, batch: Any, result: Any) -> None:
        self._process(batch, result)
        if batch.forward_mode.is_decode():
            self._ends.append((time.perf_counter(), batch.batch_size()))
