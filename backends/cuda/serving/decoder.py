"""SGLang's scheduler, driven one step at a time.

A step of the serving loop uses it like this::

    admit()           requests whose prompts fit are prefilled and join; says what will decode next
    launch(group)     slots for one more token each, then the decode graph of that group is enqueued, behind some unit
    done()            polled; finetuning goes on meanwhile
    finish()          tokens are read, finished requests leave
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from backends.cuda.memory.compaction import Compactor, CudaCompactor, HostCompactor
from backends.cuda.serving.arrived_prefill import as_arrived
from backends.cuda.serving.graph_start import GraphStart
from backends.cuda.serving.kv_pool import KvMemory
from backends.cuda.serving.served_request import Served, tokenized
from backends.cuda.serving.timeline import Timeline
from harli_core.errors import AuditError, ConfigError
from harli_core.memory.compaction import Compaction

Prefill = Literal["local", "elsewhere"]
"""``local``: prompts are computed here. ``elsewhere``: their KV is taken as arrived, with the first token, as SGLang's
``fake`` transfer of a disaggregated decode instance does; what it holds is whatever the slots held."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What a step produced: how many requests got a token, those that are done, the decode graph's begin and duration."""

    batch: int
    completed: tuple[Served, ...]
    begin: Any
    decode_ms: float


@dataclass(slots=True)
class _Launched:
    batch: Any
    result: Any
    begin: Any
    end: Any
    began_ms: float


class Decoder:
    """Owns a `Scheduler` made by `scheduler_factory`; all calls come from one thread and one stream."""

    def __init__(self, scheduler: Any, timeline: Timeline, stream: Any, prefill: Prefill) -> None:
        """``stream`` is where the scheduler's own work goes (`None` on a CPU); graphs keep the SMs of their capture."""
        self.scheduler = scheduler
        self.prefill = prefill
        self.memory: KvMemory = scheduler.token_to_kv_pool_allocator.memory
        self.stream = stream
        self._timeline = timeline
        self._runner = scheduler.tp_worker.model_runner
        self._served: dict[str, Served] = {}
        self._launched: _Launched | None = None
        self._last_group = 0
        self._emitted_ms: float | None = None
        self._prefilled: list[Served] = []
        graphs = getattr(self._runner, "decode_cuda_graph_runner", None) if self.memory.on_gpu else None
        self._start = GraphStart(timeline, stream, None if graphs is None else graphs.backend)
        self._some_left = False
        self._update_running = scheduler.update_running_batch
        scheduler.update_running_batch = self._filter_only
        for sender in (scheduler.ipc_channels.send_to_detokenizer, scheduler.ipc_channels.send_to_tokenizer):
            if sender.socket is not None:  # nobody listens: tokens are read from the requests
                sender.socket.close(linger=0)
            sender.socket = None
        scheduler.load_snapshot_writer = None  # nobody routes by our load
        table = scheduler.req_to_token_pool.req_to_token
        geometry = self.memory.allocator.geometry
        self._compactor: Compactor
        if self.memory.on_gpu:
            self._compactor, self._tables = CudaCompactor(self.memory.provider.pool, geometry), table
        else:
            self._compactor, self._tables = HostCompactor(self.memory.provider.pool, geometry), table.numpy()

    # Requests

    def submit(self, index: int, prompt: Sequence[int], output_tokens: int, now_ms: float) -> Served:
        """Take a request in: ``output_tokens`` will be produced, the end-of-sequence token notwithstanding."""
        name = str(index)
        waiting = len(self.scheduler.waiting_queue)
        self.scheduler.handle_generate_request(tokenized(name, prompt, output_tokens))
        if len(self.scheduler.waiting_queue) != waiting + 1:
            raise ConfigError(f"request {index}: SGLang did not take it")
        request = self.scheduler.waiting_queue[-1]
        if request.to_finish is not None or request.sampling_params.max_new_tokens < output_tokens:
            self.scheduler.waiting_queue.pop()
            raise ConfigError(
                f"request {index}: {len(prompt)} prompt and {output_tokens} output tokens are more than the context "
                f"of {self.scheduler.max_req_len} tokens or the KV cache"
            )
        served = Served(index, request, last_token_ms=now_ms if self.prefill == "elsewhere" else None)
        self._served[name] = served
        return served

    @property
    def running(self) -> list[Any]:
        """SGLang's requests that decode."""
        return [request for request in self.scheduler.running_batch.reqs if not request.finished()]

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV the running requests hold."""
        return sum(len(request.origin_input_ids) + len(request.output_ids) - 1 for request in self.running)

    @property
    def waiting(self) -> list[Any]:
        """SGLang's requests that were not admitted yet."""
        return list(self.scheduler.waiting_queue)

    @property
    def waiting_tokens(self) -> int:
        """Tokens whose KV they will bring."""
        return sum(len(request.origin_input_ids) + len(request.output_ids) for request in self.scheduler.waiting_queue)

    @property
    def unfinished(self) -> list[Served]:
        """Requests that were taken in and are not done."""
        return list(self._served.values())

    @property
    def idle(self) -> bool:
        """Whether there is nothing to decode and nothing waits."""
        return not self._served

    # A step

    def admit(self, ran_prefill: Callable[[], None]) -> bool:
        """Let in what fits and prefill it, batch after batch; says whether there is something to decode.

        ``ran_prefill`` is called after each prefill that was computed here.
        """
        with self._no_grad():
            return self._admit(ran_prefill)

    def _admit(self, ran_prefill: Callable[[], None]) -> bool:
        scheduler = self.scheduler
        if not scheduler.running_batch.is_empty():
            self._filter_only(scheduler.running_batch)  # who left makes room for who waits
            if not scheduler.waiting_queue and not scheduler.running_batch.is_empty():
                return True
        while True:
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
            if batch is None or not batch.forward_mode.is_extend():
                scheduler.last_batch = None
                return batch is not None
            result = scheduler.run_batch(batch) if self.prefill == "local" else as_arrived(scheduler, batch)
            before = {request.rid: len(request.output_ids) for request in batch.reqs}
            scheduler.process_batch_result(batch, result)
            self._some_left = True  # those that want no more than this token
            self._prefilled += [
                self._served[request.rid] for request in batch.reqs if len(request.output_ids) > before[request.rid]
            ]
            scheduler.last_batch = batch
            if self.prefill == "local":
                ran_prefill()

    def take_prefilled(self, now_ms: float) -> tuple[list[Served], list[Served]]:
        """Requests that prefill gave a token since the last call, and those of them that want no more."""
        new, self._prefilled = self._prefilled, []
        for served in new:
            if self.prefill == "local" or served.last_token_ms is None:
                served.last_token_ms = now_ms
        done = [served for served in new if served.request.finished()]
        for served in done:
            del self._served[served.request.rid]
        return new, done

    def launch(self, group: int, behind: Any = None) -> bool:
        """Enqueue one decode step with the graphs of ``group``; `False`: memory ran out and nobody is left to decode.

        The graph waits, on the GPU, for the mark ``behind``; what prepares it does not.
        """
        with self._no_grad():
            return self._launch(group, behind)

    def _launch(self, group: int, behind: Any) -> bool:
        scheduler = self.scheduler
        self._last_group = group
        before = list(scheduler.running_batch.reqs)
        batch = self._update_running(scheduler.running_batch)
        scheduler.running_batch = batch
        if len(batch.reqs) < len(before):
            self._sent_back(before, batch.reqs)
        if batch.is_empty():
            return False
        if self.memory.on_gpu:
            from sglang.srt.multiplex import pdmux_context

            if scheduler.enable_pdmux:
                pdmux_context.set_current_stream_idx(group)
                self._runner.update_decode_attn_backend(group)
        self._start.before(behind)
        result = scheduler.run_batch(batch)
        end = self._timeline.mark(self.stream)
        self._launched = _Launched(batch, result, self._start.begin, end, self._start.began_ms)
        return True

    def _sent_back(self, before: Sequence[Any], left: Sequence[Any]) -> None:
        """SGLang sent requests back to wait for slots: they wait from their last token on.

        The only one left it gives up instead, as its memory never grows; ours does, so that one waits too.
        """
        decoding = {request.rid for request in left}
        for request in before:
            if request.rid not in decoding and request.rid in self._served and not request.finished():
                served = self._served[request.rid]
                if request not in self.scheduler.waiting_queue:
                    request.to_finish = None
                    self.scheduler._add_request_to_queue(request, is_retracted=True)
                served.preemptions += 1
                served.last_token_ms = self._emitted_ms or served.last_token_ms

    def done(self) -> bool:
        """Whether the step that was launched is over."""
        assert self._launched is not None, "a step was launched"
        return self._timeline.passed(self._launched.end)

    @property
    def launched_end(self) -> Any:
        """The mark behind the step that was launched."""
        assert self._launched is not None, "a step was launched"
        return self._launched.end

    @property
    def began_ms(self) -> float:
        """When, on the host, the graph of the step that was launched could begin."""
        assert self._launched is not None, "a step was launched"
        return self._launched.began_ms

    def finish(self, now_ms: float) -> Finished:
        """Read the tokens of the step that is `done`; finished requests give their slots back."""
        step, self._launched = self._launched, None
        assert step is not None, "a step was launched"
        with self._no_grad():
            self.scheduler.process_batch_result(step.batch, step.result)
        self.scheduler.last_batch = None
        self._emitted_ms = now_ms
        reqs = step.batch.reqs
        completed = [self._served.pop(request.rid) for request in reqs if request.finished()]
        self._some_left = self._some_left or bool(completed)
        return Finished(len(reqs), tuple(completed), step.begin, self._timeline.between_ms(step.begin, step.end))

    def abort_all(self) -> None:
        """Send every request away, and run the steps that SGLang needs for that; none is launched now."""
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.abort_request(AbortReq(rid="", abort_all=True))
        waiting = {request.rid for request in self.scheduler.waiting_queue}
        self._served = {rid: served for rid, served in self._served.items() if rid not in waiting}
        self.scheduler.waiting_queue.clear()
        while not self.idle and self.admit(lambda: None):
            self.take_prefilled(0.0)
            if self.launch(self._last_group):
                while not self.done():
                    pass
                self.finish(0.0)
        self.scheduler.waiting_queue.clear()
        self._served.clear()

    # Memory

    def compact(self, rows: int) -> Compaction | None:
        """Empty up to ``rows`` rows more by moving tokens; at a step boundary only. `None`: nothing moved."""
        compaction = self.memory.allocator.compact(rows)
        if compaction.source.size == 0:
            return None
        self._compactor.apply(compaction, self._tables)
        return compaction

    def totals_changed(self) -> None:
        """Rows were lent or came back: tell SGLang's leak check what there is now, and let who waits try again."""
        allocator = self.scheduler.token_to_kv_pool_allocator
        total = allocator.size - allocator.lent_tokens
        self.scheduler.invariant_checker.max_total_num_tokens = total
        object.__setattr__(self.scheduler.pool_stats_observer, "max_total_num_tokens", total)  # it is frozen
        self.scheduler.running_batch.batch_is_full = False

    def check_idle(self) -> None:
        """SGLang's own checks of an idle server: leaks of slots and requests; raises where it finds one."""
        self.totals_changed()
        if not self.scheduler.running_batch.is_empty():
            self._filter_only(self.scheduler.running_batch)
        if not self.scheduler.is_fully_idle():
            raise AuditError("SGLang still has work although every request is done")
        self.scheduler.on_idle()

    def check_integrity(self) -> None:
        """The slots of the running requests, as the table has them, are the ones in use, each once."""
        held = [
            self.scheduler.req_to_token_pool.req_to_token[request.req_pool_idx, : request.kv.kv_allocated_len]
            for request in self.running
        ]
        slots = np.concatenate([part.cpu().numpy() for part in held]) if held else np.empty(0, dtype=np.int32)
        assert len(np.unique(slots)) == len(slots) == self.memory.allocator.slots.used_tokens
        self.memory.allocator.check_integrity()

    def _no_grad(self) -> Any:
        """SGLang computes without gradients; units of finetuning, on the same thread, with them."""
        import torch

        return torch.no_grad()

    def _filter_only(self, batch: Any) -> Any:
        """What SGLang calls to prepare a decode batch; we do that in `launch`, once finetuning has had its turn."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        batch.forward_mode = ForwardMode.DECODE  # a prefill batch becomes the running one as it is
        if self._some_left:
            self._some_left = False
            size = batch.batch_size()
            batch.filter_batch()
            if batch.batch_size() < size:
                batch.batch_is_full = False
        return batch
