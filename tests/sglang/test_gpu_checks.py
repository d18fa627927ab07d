"""The checks of `tests/cuda/run_on_gpu.py` on SGLang's CPU path, and that they can fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.run_on_gpu import CPU, answers_on, logits_across, on_split, within_noise
from tests.cuda.teacher import Teacher
from tests.sglang import scenes

pytestmark = pytest.mark.filterwarnings("ignore")

SIZE = replace(CPU, requests=6, output_tokens=16)


def test_answers_are_right_on_every_split(instance: Any, model: tuple[Path, dict[str, Any]]) -> None:
    """Tokens, schedule and KV are those without finetuning, logits agree, losses are those of the job alone."""
    found = answers_on(instance, model[1], SIZE)
    assert len(found["splits"]) == len(found["logits"]["on_split"]) == len(instance.partitions.lanes) + 1
    assert all(entry["kv_checksums"] == SIZE.requests for entry in found["splits"].values())
    assert found["losses"]["steps"] > 0
    instance.remove_job()


@pytest.fixture
def given(instance: Any, model: tuple[Path, dict[str, Any]]) -> list[list[int]]:
    """Prompts, and a job beside the decoder."""
    instance.add_job(scenes.job_of(model[1], SIZE.unit_tokens))
    return scenes.prompts(SIZE.requests, SIZE.shape.vocab, SIZE.longest_prompt)


def test_teacher_sees_kv_that_was_overwritten(instance: Any, given: list[list[int]]) -> None:
    """One slot of a running request is overwritten between two steps: its logits leave the noise."""
    tokens = on_split(instance, SIZE, given, None, finetunes=False).tokens
    found = logits_across(instance, SIZE, given, tokens, (None,))
    assert within_noise(found)
    teacher = Teacher(instance, given, tokens)
    with teacher.forcing():
        on_split(instance, SIZE, given, None, finetunes=False)
    pool = instance.decoder.scheduler.token_to_kv_pool_allocator.get_kvcache()
    launch, launched = instance.decoder.launch, []

    def overwrite(group: int, behind: Any = None) -> Any:
        launched.append(group)
        if len(launched) == 8:
            request = instance.decoder.running[0]
            slot = int(instance.decoder.scheduler.req_to_token_pool.req_to_token[request.req_pool_idx, 1])
            pool.v_buffer[1][slot] += 1.0
        return launch(group, behind)

    instance.decoder.launch = overwrite
    try:
        with teacher.forcing():
            on_split(instance, SIZE, given, None, finetunes=False)
    finally:
        del instance.decoder.launch
    found["on_split"]["None"] = teacher.apart()
    assert not within_noise(found)
    instance.remove_job()


def test_forced_requests_say_what_they_are_told(instance: Any, given: list[list[int]]) -> None:
    """Whatever the model prefers."""
    told = {
        index: [(7 * index + place) % SIZE.shape.vocab for place in range(SIZE.output_tokens)] for index in range(6)
    }
    teacher = Teacher(instance, given, told)
    with teacher.forcing():
        run = on_split(instance, SIZE, given, 2, finetunes=True)
    assert run.tokens == told
    assert on_split(instance, SIZE, given, 2, finetunes=True).tokens != told
    instance.remove_job()
