"""From conversations to samples: chat templates, label masks, cut-off and packing."""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from backends.cuda.finetune.conversation import Conversation, Message
from backends.cuda.finetune.micro_batch import IGNORED, Sample
from harli_core.errors import JobError

Overlong = Literal["error", "truncate", "drop"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens that are all labels or all not."""

    ids: Sequence[int]
    trained: bool


class ChatTokenizer(Protocol):
    """Renders conversations as tokens."""

    vocabulary: int

    def pieces(self, conversation: Conversation) -> Iterator[Piece]:
        """The conversation's tokens in order."""
        ...


class ByteTokenizer:
    """A token a byte, and one a role; for tests and models that are trained from nothing."""

    BEGIN, END = 256, 257
    ROLES: ClassVar = {"system": 258, "user": 259, "assistant": 260, "call": 261, "tool": 262}
    vocabulary = 263

    def pieces(self, conversation: Conversation) -> Iterator[Piece]:
        """``BEGIN``, then for each turn its role, its bytes and ``END``; the role's token is never a label."""
        yield Piece([self.BEGIN], trained=False)
        if conversation.tools:
            text = json.dumps(list(conversation.tools), sort_keys=True)
            yield Piece([self.ROLES["system"], *text.encode(), self.END], trained=False)
        for message in conversation.messages:
            yield Piece([self.ROLES[message.role]], trained=False)
            yield Piece([*message.content.encode(), self.END], trained=message.trained)


class TemplateTokenizer:
    """A tokenizer of transformers with its own chat template.

    What is trained on is found by rendering the conversation up to before and up to after each turn; a template that
    writes earlier turns differently once later ones follow cannot be cut like that and is refused, unless only the last
    turn is trained on.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Raise `JobError` for a tokenizer without chat template."""
        if not getattr(tokenizer, "chat_template", None):
            raise JobError(
                "the model's tokenizer has no chat template; add chat_template.jinja to its folder, "
                "or set tokenizer = 'byte'"
            )
        self.tokenizer = tokenizer
        self.vocabulary = len(tokenizer)

    def pieces(self, conversation: Conversation) -> Iterator[Piece]:
        """Text between two cuts is tokenized for itself, as cuts are at the template's own markers."""
        messages = conversation.messages
        whole = self._render(conversation, len(messages), ask=False)
        done = 0
        for index, message in enumerate(messages):
            if not message.trained:
                continue
            before = self._render(conversation, index, ask=True)
            after = whole if index + 1 == len(messages) else self._render(conversation, index + 1, ask=False)
            if not (whole.startswith(after) and after.startswith(before) and len(before) >= done):
                raise JobError(
                    f"{conversation.source}: the chat template renders turn {index + 1} differently when others follow, so "
                    "its tokens cannot be told apart; train on last turns only with mask_history = true"
                )
            yield Piece(self._ids(whole[done : len(before)]), trained=False)
            yield Piece(self._ids(whole[len(before) : len(after)]), trained=True)
            done = len(after)
        if done < len(whole):
            yield Piece(self._ids(whole[done:]), trained=False)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _render(self, conversation: Conversation, count: int, *, ask: bool) -> str:
        from jinja2 import TemplateError

        messages = [_openai(message) for message in conversation.messages[:count]]
        tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in conversation.tools]
        try:
            rendered: str = self.tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=ask
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            fault = " ".join(str(error).split())
            raise JobError(
                f"{conversation.source}: the chat template cannot render this conversation ({fault})"
            ) from None
        return rendered


def samples_of(
    conversations: Sequence[Conversation],
    tokenizer: ChatTokenizer,
    cutoff_len: int,
    *,
    overlong: Overlong = "error",
    train_on_prompt: bool = False,
    mask_history: bool = False,
) -> list[Sample]:
    """Tokens and labels of each conversation; raises `JobError` for one longer than ``cutoff_len``, unless told otherwise.

    ``train_on_prompt`` makes every token a label, ``mask_history`` only those of the last turn.
    """
    made = []
    for conversation in conversations:
        chosen = _last_turn_only(conversation) if mask_history else conversation
        ids: list[int] = []
        labels: list[int] = []
        for piece in tokenizer.pieces(chosen):
            ids += piece.ids
            labels += piece.ids if piece.trained or train_on_prompt else [IGNORED] * len(piece.ids)
        if len(ids) > cutoff_len:
            if overlong == "error":
                raise JobError(
                    f"{conversation.source}: {len(ids)} tokens, more than cutoff_len = {cutoff_len}; raise cutoff_len, "
                    "or set overlong = 'truncate' or 'drop'"
                )
            if overlong == "drop":
                continue
            ids, labels = ids[:cutoff_len], labels[:cutoff_len]
        made.append(Sample(np.asarray(ids, np.int64), np.asarray(labels, np.int64)))
    return made


def packed(samples: Sequence[Sample], cutoff_len: int, *, apart: bool) -> list[Sample]:
    """Samples laid end to end into sequences of at most ``cutoff_len`` tokens, longest first, each where it fits tightest.

    ``apart`` keeps attention and positions of each to itself (``neat_packing``); otherwise they run on.
    """
    order = sorted(range(len(samples)), key=lambda place: (-len(samples[place]), place))
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # tokens left and number of a row, ascending
    for place in order:
        size = len(samples[place])
        tightest = bisect_left(rooms, (size, 0))
        if tightest == len(rooms):
            left, row = cutoff_len, len(rows)
            rows.append([])
        else:
            left, row = rooms.pop(tightest)
        rows[row].append(place)
        insort(rooms, (left - size, row))
    made = []
    for places in rows:
        parts = [samples[place] for place in places]
        segments = np.repeat(np.arange(len(parts)), [len(part) for part in parts]) if apart else None
        ids, labels = (np.concatenate([getattr(part, what) for part in parts]) for what in ("ids", "labels"))
        made.append(Sample(ids, labels, segments))
    return made


def _last_turn_only(conversation: Conversation) -> Conversation:
    messages = conversation.messages
    last = max(index for index, message in enumerate(messages) if message.trained)
    kept = [
        Message(message.role, message.content, trained=message.trained and index == last)
        for index, message in enumerate(messages)
    ]
    return Conversation(tuple(kept), conversation.tools, conversation.source)


def _openai(message: Message) -> dict[str, Any]:
    """A turn as chat templates know it."""
    if message.role != "call":
        return {"role": message.role, "content": message.content}
    try:
        call = json.loads(message.content)
    except json.JSONDecodeError:
        return {"role": "assistant", "content": message.content}
    calls = call if isinstance(call, list) else [call]
    if not all(isinstance(one, dict) and "name" in one for one in calls):
        return {"role": "assistant", "content": message.content}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": one} for one in calls]}
