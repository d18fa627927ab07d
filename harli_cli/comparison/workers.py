"""Scenarios on several processes: each process has one scenario at a time, so that one which dies names its scenario.

Every lane is an executor with a single process. A pool of several would only say that one of them died.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from harli_core.errors import HarliError, WorkerError

Task = TypeVar("Task")
Answer = TypeVar("Answer")


def run_all(
    tasks: Sequence[Task],
    work: Callable[[Task], Answer],
    jobs: int,
    done: Callable[[Task], None],
    alike: Callable[[Task], Hashable] | None = None,
) -> list[Answer]:
    """``work`` on every task, ``jobs`` at a time, answers in the order of ``tasks``; ``str(task)`` names a task.

    Tasks with equal ``alike(task)`` take about equally long, so what took longest goes first and the processes end
    together; what nobody has seen yet goes before that, in order. Raises `WorkerError` for a process that died. However
    this ends, no process of it is left.
    """
    from concurrent.futures import FIRST_COMPLETED, Future, wait  # noqa: PLC0415
    from multiprocessing import resource_tracker  # noqa: PLC0415

    from loky import ProcessPoolExecutor  # noqa: PLC0415  (only a comparison needs it)
    from loky.process_executor import BrokenProcessPool  # noqa: PLC0415

    answers: dict[int, Answer] = {}
    waiting = dict(enumerate(tasks))
    took_s: dict[Hashable, float] = {}

    def following() -> int:
        return max(waiting, key=lambda index: (took_s.get(kind(waiting[index]), math.inf), -index))

    def kind(task: Task) -> Hashable:
        return alike(task) if alike is not None else None

    resource_tracker.ensure_running()  # now, since its start ends any hold on interrupts
    lanes = [ProcessPoolExecutor(max_workers=1) for _ in range(min(jobs, len(tasks)))]
    running: dict[Future[Answer], tuple[int, float, ProcessPoolExecutor]] = {}
    try:
        idle = list(lanes)
        while True:
            while idle and waiting:
                lane, index = idle.pop(), following()
                with _interrupts_held_back():
                    running[lane.submit(work, waiting.pop(index))] = (index, time.monotonic(), lane)
            if not running:
                return [answers[index] for index in range(len(tasks))]
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                index, began_s, lane = running.pop(future)
                try:
                    answers[index] = future.result()
                except HarliError as error:
                    raise type(error)(f"{tasks[index]}: {error}") from None
                except BrokenProcessPool as error:
                    raise WorkerError(f"{tasks[index]}: its process died{_how(error)}; no result was written") from None
                took_s[kind(tasks[index])] = time.monotonic() - began_s
                done(tasks[index])
                idle.append(lane)
    finally:
        with _interrupts_held_back():
            for lane in lanes:
                lane.shutdown(wait=True, kill_workers=True)


def _how(error: BaseException) -> str:
    """The exit code that loky found, as in ``SIGKILL(-9)``."""
    _, brace, rest = str(error).partition("{")
    code = rest.partition("}")[0]
    return f" ({code})" if brace and code else ""


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C in here counts at the end; processes that are started here never see it, their parent ends them.

    The mask is what they inherit. It holds for one thread, and a library's other threads may take the signal for it:
    hence the handler.
    """
    noted: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _frame: noted.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if noted:
        signal.raise_signal(signal.SIGINT)
