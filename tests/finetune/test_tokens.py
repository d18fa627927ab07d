"""Tokens and labels: byte tokenizer, chat templates, cut-off, masking, packing and padding."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from backends.cuda.finetune.conversation import Conversation, Message
from backends.cuda.finetune.micro_batch import IGNORED, Sample, collate, optimizer_batch
from backends.cuda.finetune.tokens import ByteTokenizer, TemplateTokenizer, packed, samples_of
from harli_core.errors import JobError
from tests.finetune.tiny import (
    gradients,
    plain_gradients,
    recipe,
    tiny_engine,
    tiny_feed,
    tiny_peft,
    tiny_samples,
    worst_difference,
)

CHATML = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LAST_TURN_DIFFERS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}<think>{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TWO_TURNS = Conversation(
    (
        Message("system", "s", trained=False),
        Message("user", "ab", trained=False),
        Message("assistant", "cd", trained=True),
        Message("user", "e", trained=False),
        Message("assistant", "f", trained=True),
    ),
    (),
    "a test",
)


def byte_level(template: str | None) -> Any:
    """A real fast tokenizer of transformers: a token a byte, special tokens for turns."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner)
    marks = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
    made.add_special_tokens({"additional_special_tokens": marks})
    made.chat_template = template
    return made


def labelled(sample: Sample, tokenizer: Any) -> str:
    """The text of the tokens that are labels."""
    return str(tokenizer.decode(sample.ids[sample.labels != IGNORED].tolist()))


def test_byte_tokenizer_in_full() -> None:
    """Role, bytes and end of every turn; only the assistant's bytes and end are labels."""
    conversation = Conversation((Message("user", "a", trained=False), Message("assistant", "b", trained=True)), (), "")
    (sample,) = samples_of([conversation], ByteTokenizer(), 10)
    assert sample.ids.tolist() == [256, 259, ord("a"), 257, 260, ord("b"), 257]
    assert sample.labels.tolist() == [IGNORED] * 5 + [ord("b"), 257]


def test_chat_template_labels_the_assistants_turns() -> None:
    """The tokens are those of the whole rendered conversation, the labels the answers with their end."""
    tokenizer = byte_level(CHATML)
    (sample,) = samples_of([TWO_TURNS], TemplateTokenizer(tokenizer), 100)
    text = "<|system|>s<|end|><|user|>ab<|end|><|assistant|>cd<|end|><|user|>e<|end|><|assistant|>f<|end|>"
    assert tokenizer.decode(sample.ids.tolist()) == text
    assert sample.ids.tolist() == tokenizer(text)["input_ids"]
    assert labelled(sample, tokenizer) == "cd<|end|>f<|end|>"


def test_masking_settings() -> None:
    """The last turn only, or everything."""
    tokenizer = byte_level(CHATML)
    wrapped = TemplateTokenizer(tokenizer)
    (last,) = samples_of([TWO_TURNS], wrapped, 100, mask_history=True)
    assert labelled(last, tokenizer) == "f<|end|>"
    (everything,) = samples_of([TWO_TURNS], wrapped, 100, train_on_prompt=True)
    assert (everything.labels == everything.ids).all()


def test_a_template_that_rewrites_turns() -> None:
    """It cannot be cut into turns, and the message says what can be done; the last turn alone can be told."""
    tokenizer = byte_level(LAST_TURN_DIFFERS)
    wrapped = TemplateTokenizer(tokenizer)
    with pytest.raises(JobError, match=r"a test: the chat template renders turn 3 differently .* mask_history = true"):
        samples_of([TWO_TURNS], wrapped, 100)
    (last,) = samples_of([TWO_TURNS], wrapped, 100, mask_history=True)
    assert labelled(last, tokenizer) == "<think>f<|end|>"


def test_tools_reach_the_template() -> None:
    """Calls arrive as tool calls, tools as functions; a call is a label."""
    conversation = Conversation(
        (
            Message("user", "w", trained=False),
            Message("call", '{"name": "t", "arguments": {"a": 1}}', trained=True),
            Message("tool", "sun", trained=False),
            Message("assistant", "ok", trained=True),
        ),
        ({"name": "t"},),
        "",
    )
    tokenizer = byte_level(CHATML)
    (sample,) = samples_of([conversation], TemplateTokenizer(tokenizer), 300)
    text = tokenizer.decode(sample.ids.tolist())
    assert text.startswith('<tools>[{"type": "function", "function": {"name": "t"}}]</tools><|user|>w')
    assert labelled(sample, tokenizer) == (
        '[{"type": "function", "function": {"name": "t", "arguments": {"a": 1}}}]<|end|>ok<|end|>'
    )


def test_tokenizers_that_cannot_be_used() -> None:
    """No chat template, or one that raises: one line each."""
    with pytest.raises(JobError, match=r"no chat template; add chat_template.jinja"):
        TemplateTokenizer(byte_level(None))
    raising = TemplateTokenizer(byte_level("{{ raise_exception('no system turn') }}"))
    with pytest.raises(JobError, match=r"a test: the chat template cannot render .* \(no system turn\)"):
        samples_of([TWO_TURNS], raising, 100)


def test_a_sample_longer_than_cutoff_len() -> None:
    """Refused with its length and what to do; cut or dropped if asked."""
    tokenizer = ByteTokenizer()
    with pytest.raises(
        JobError, match=r"a test: 18 tokens, more than cutoff_len = 17; raise cutoff_len, or set overlong"
    ):
        samples_of([TWO_TURNS], tokenizer, 17)
    (whole,) = samples_of([TWO_TURNS], tokenizer, 18)
    (cut,) = samples_of([TWO_TURNS], tokenizer, 17, overlong="truncate")
    assert cut.ids.tolist() == whole.ids.tolist()[:17]
    assert samples_of([TWO_TURNS], tokenizer, 17, overlong="drop") == []


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=30), apart=st.booleans())
def test_packing_keeps_every_sample_whole(lengths: list[int], apart: bool) -> None:
    """Each sample is in one row, contiguous, once; rows hold ``cutoff_len`` at most; two rows never fit into one."""
    samples = [Sample(np.full(length, number), np.full(length, number)) for number, length in enumerate(lengths)]
    rows = packed(samples, 20, apart=apart)
    found = [row.ids[np.flatnonzero(np.r_[True, row.ids[1:] != row.ids[:-1]])].tolist() for row in rows]
    assert sorted(chain.from_iterable(found)) == list(range(len(lengths)))
    assert sorted(np.concatenate([row.ids for row in rows]).tolist()) == sorted(
        number for number, length in enumerate(lengths) for _ in range(length)
    )
    sizes = sorted(map(len, rows))
    assert sizes[-1] <= 20
    assert len(sizes) < 2 or sizes[0] + sizes[1] > 20
    assert all((row.segments is not None) == apart for row in rows)


@given(
    lengths=st.lists(st.integers(2, 20), min_size=1, max_size=12),
    tokens=st.integers(1, 100),
    multiple=st.integers(1, 8),
)
def test_micro_batches_hold_every_sample_once(lengths: list[int], tokens: int, multiple: int) -> None:
    """Whatever the budget: all tokens and targets are there, and only a lone sample may exceed the budget."""
    samples = [Sample(np.arange(length) + 100 * number, np.arange(length)) for number, length in enumerate(lengths)]
    batch = optimizer_batch(range(len(samples)), samples, tokens, multiple)
    assert batch.tokens == sum(lengths)
    assert batch.trained_tokens == sum(length - 1 for length in lengths)
    firsts = sorted(number for part in batch.micro_batches for number in part.ids[:, 0].tolist())
    assert firsts == [100 * number for number in range(len(lengths))]
    for part in batch.micro_batches:
        rows, length = part.shape
        assert length % multiple == 0
        assert rows == 1 or rows * length <= tokens


def test_neat_packing_gives_the_gradients_of_the_samples_alone() -> None:
    """Sequences packed apart neither see each other nor lend each other targets: the same sum as unpacked."""
    samples = tiny_samples(9)
    rows = packed(samples, 40, apart=True)
    assert len(rows) < len(samples)
    batch = optimizer_batch(range(9), samples, 1, 1)
    _, expected = plain_gradients(tiny_peft(), batch)
    found = gradients(tiny_engine(tiny_peft(), tiny_feed(len(rows), 80, samples=rows), recipe(), window_layers=2))
    assert worst_difference(found, expected) < 1e-9


def test_plain_packing_runs_on() -> None:
    """Without ``neat_packing`` a row is one long sequence, as LLaMA-Factory has it."""
    rows = packed(tiny_samples(4), 80, apart=False)
    part = collate(rows, 80)
    assert part.mask is None
    assert torch.equal(part.positions, torch.arange(80)[None])
