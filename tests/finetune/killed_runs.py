"""Runs a job again and again, killing it at random, until it comes to its end: ``killed_runs.py JOB.toml SEED``.

A program of its own, as it forks: the children share what was imported once. Prints how often it killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

import peft  # noqa: F401  once, for all children
import torch
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers import AutoModelForCausalLM  # noqa: F401

from backends.cuda.finetune.job import prepare
from backends.cuda.finetune.job_file import read_job

ATTEMPTS = 80


def child(path: Path, units: int | None, delay_s: float | None) -> None:
    """Run the job; die without warning after ``units`` units or ``delay_s`` seconds of them."""
    ready = prepare(read_job(path), "cpu")
    if delay_s is not None:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    done = 0
    while (unit := ready.engine.next_unit()) is not None:
        if done == units:
            os.kill(os.getpid(), signal.SIGKILL)
        ready.engine.run(unit)
        done += 1
    ready.engine.close()
    ready.write_adapter()


def main() -> int:
    """Kill at random units, and at random times, checkpoints being written among them."""
    path, rng = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    torch.set_num_threads(1)
    killed = 0
    for attempt in range(ATTEMPTS):
        units = rng.randint(20, 90) if attempt % 2 == 0 else None
        delay_s = rng.uniform(0.02, 0.5) if units is None else None
        process = os.fork()
        if process == 0:
            child(path, units, delay_s)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            killed += 1
            continue
        print(killed)  # noqa: T201
        return os.waitstatus_to_exitcode(status)
    return 1


if __name__ == "__main__":
    sys.exit(main())
