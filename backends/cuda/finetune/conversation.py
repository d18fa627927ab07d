"""Conversations, and the data sets of LLaMA-Factory that they come from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harli_core.errors import JobError

Role = Literal["system", "user", "assistant", "call", "tool"]
INFO = "dataset_info.json"
ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
MEDIA = ("images", "videos", "audios")
PREFERENCE = ("chosen", "rejected", "kto_tag")
ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
SHAREGPT = {"messages": "conversations"}
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. ``trained``: whether its tokens are labels. A ``call`` is the assistant's, its content a JSON object."""

    role: Role
    content: str
    trained: bool


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order, the system prompt among them; ``tools`` as JSON schema objects; ``source`` says where it is from."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    source: str


@dataclass(frozen=True, slots=True)
class DatasetEntry:
    """One data set as `dataset_info.json` describes it."""

    path: Path
    formatting: Literal["alpaca", "sharegpt", "v1"]
    columns: Mapping[str, str]
    tags: Mapping[str, str]


def read_datasets(folder: Path, names: Sequence[str], max_samples: int | None = None) -> list[Conversation]:
    """All conversations of the data sets ``names``, by their names in `dataset_info.json` or as files of ``folder``.

    Reads the formats ``alpaca`` and ``sharegpt`` (JSON or JSON lines) and the ``v1`` lines whose messages hold typed
    content and loss weights. Raises `JobError` naming file, row and column.
    """
    made: list[Conversation] = []
    for name in names:
        entry = find_dataset(folder, name)
        rows = read_rows(entry.path)
        if not rows:
            raise JobError(f"{entry.path}: the dataset is empty")
        chosen = rows[:max_samples]
        made += [conversation(row, entry, f"{entry.path}, row {number}") for number, row in enumerate(chosen, start=1)]
    return made


def find_dataset(folder: Path, name: str) -> DatasetEntry:
    """Look ``name`` up; raises `JobError` with the known names."""
    direct = folder / name
    if direct.suffix in (".json", ".jsonl") and direct.is_file():
        return DatasetEntry(direct, _guessed(direct), {}, TAGS)
    info = folder / INFO
    known = _json(info)
    if not isinstance(known, dict):
        raise JobError(f"{info}: expected an object of data sets by name")
    if name not in known:
        raise JobError(
            f"dataset {name!r} is not in {info}, nor a file in {folder}; known are {', '.join(sorted(known))}"
        )
    values = known[name]
    if not isinstance(values, dict) or "file_name" not in values:
        where = ", ".join(key for key in ELSEWHERE if isinstance(values, dict) and key in values)
        raise JobError(
            f"{info}: dataset {name!r} has no file_name" + (f", only {where}: download it first" if where else "")
        )
    formatting = values.get("formatting", "alpaca")
    columns, tags = values.get("columns", {}), values.get("tags", {})
    if formatting not in ("alpaca", "sharegpt"):
        raise JobError(f"{info}: dataset {name!r} has formatting {formatting!r}, expected alpaca or sharegpt")
    if values.get("ranking") or any(key in columns for key in PREFERENCE):
        raise JobError(f"{info}: dataset {name!r} holds preferences; finetuning here is supervised")
    media = [key for key in MEDIA if key in columns]
    if media:
        raise JobError(f"{info}: dataset {name!r} has {', '.join(media)}; only text can be trained on")
    return DatasetEntry(folder / str(values["file_name"]), formatting, columns, {**TAGS, **tags})


def read_rows(path: Path) -> list[Any]:
    """Objects of a ``.json`` array or of ``.jsonl`` lines."""
    if path.suffix != ".jsonl":
        rows = _json(path)
        if not isinstance(rows, list):
            raise JobError(f"{path}: expected an array of rows")
        return rows
    made = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if line.strip():
            try:
                made.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise JobError(f"{path}, line {number}: not JSON ({error})") from None
    return made


def conversation(row: Any, entry: DatasetEntry, source: str) -> Conversation:
    """One row as a conversation; raises `JobError`."""
    if not isinstance(row, dict):
        raise JobError(f"{source}: expected an object, not {type(row).__name__}")
    if entry.formatting == "alpaca":
        messages = list(_alpaca(row, entry.columns, source))
    elif entry.formatting == "sharegpt":
        messages = list(_sharegpt(row, entry, source))
    else:
        messages = list(_v1(row, source))
    if not any(message.trained for message in messages):
        raise JobError(f"{source}: no turn of the assistant to train on")
    return Conversation(tuple(messages), _tools(row, entry.columns, source), source)


def _alpaca(row: dict[str, Any], columns: Mapping[str, str], source: str) -> Iterator[Message]:
    names = {**ALPACA, **columns}
    yield from _system(row, names, source)
    history = row.get(names["history"]) if "history" in names else None
    for pair in history or ():
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise JobError(f"{source}: {names['history']}: expected pairs of question and answer, not {pair!r}")
        yield Message("user", pair[0], trained=False)
        yield Message("assistant", pair[1], trained=True)
    query = row.get(names["query"]) or ""
    asked = [_column(row, names["prompt"], source), _as_text(query, names["query"], source)]
    yield Message("user", "\n".join(text for text in asked if text), trained=False)
    yield Message("assistant", _column(row, names["response"], source), trained=True)


def _sharegpt(row: dict[str, Any], entry: DatasetEntry, source: str) -> Iterator[Message]:
    names, tags = {**SHAREGPT, **entry.columns}, entry.tags
    roles: dict[str, Role] = {
        tags["user_tag"]: "user",
        tags["assistant_tag"]: "assistant",
        tags["observation_tag"]: "tool",
        tags["function_tag"]: "call",
        tags["system_tag"]: "system",
    }
    turns = _list(row, names["messages"], source)
    if not (turns and isinstance(turns[0], dict) and turns[0].get(tags["role_tag"]) == tags["system_tag"]):
        yield from _system(row, names, source)
    asked = True
    for number, turn in enumerate(turns, start=1):
        where = f"{source}, {names['messages']} {number}"
        if not isinstance(turn, dict):
            raise JobError(f"{where}: expected an object, not {type(turn).__name__}")
        tag = _column(turn, tags["role_tag"], where)
        role = roles.get(tag)
        if role is None:
            raise JobError(f"{where}: {tags['role_tag']} is {tag!r}, expected one of {', '.join(sorted(roles))}")
        if role == "system":
            if number != 1:
                raise JobError(f"{where}: a system turn must be the first one")
        elif (role in ("user", "tool")) is not asked:
            expected = "a question or an observation" if asked else "an answer or a function call"
            raise JobError(f"{where}: expected {expected}, not {tag!r}: turns must alternate")
        else:
            asked = not asked
        yield Message(role, _column(turn, tags["content_tag"], where), trained=role in ("assistant", "call"))


def _v1(row: dict[str, Any], source: str) -> Iterator[Message]:
    roles: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
    for number, turn in enumerate(_list(row, "messages", source), start=1):
        where = f"{source}, messages {number}"
        if not isinstance(turn, dict):
            raise JobError(f"{where}: expected an object, not {type(turn).__name__}")
        named = _column(turn, "role", where)
        if named not in roles:
            raise JobError(f"{where}: role is {named!r}, expected one of {', '.join(sorted(roles))}")
        parts = _list(turn, "content", where)
        texts, role = [], roles[named]
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "tool_call" and role == "assistant" and len(parts) == 1:
                role = "call"
            elif kind != "text":
                raise JobError(f"{where}: content of type {kind!r} cannot be trained on, expected text")
            texts.append(_column(part, "value", where))
        weight = turn.get("loss_weight", 1.0 if named == "assistant" else 0.0)
        if weight not in (0, 1):
            raise JobError(f"{where}: loss_weight is {weight!r}, expected 0 or 1")
        yield Message(role, "".join(texts), trained=weight == 1)


def _system(row: dict[str, Any], names: Mapping[str, str], source: str) -> Iterator[Message]:
    text = row.get(names["system"]) if "system" in names else None
    if text:
        yield Message("system", _as_text(text, names["system"], source), trained=False)


def _tools(row: dict[str, Any], columns: Mapping[str, str], source: str) -> tuple[Mapping[str, Any], ...]:
    name = columns.get("tools", "tools")
    value = row.get(name)
    if not value:
        return ()
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise JobError(f"{source}: {name}: not JSON ({error})") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise JobError(f"{source}: {name}: expected an array of objects")
    return tuple(tools)


def _column(row: dict[str, Any], name: str, source: str) -> str:
    if name not in row:
        raise JobError(f"{source}: no column {name!r}; there are {', '.join(sorted(row)) or 'none'}")
    return _as_text(row[name], name, source)


def _list(row: dict[str, Any], name: str, source: str) -> list[Any]:
    if name not in row:
        raise JobError(f"{source}: no column {name!r}; there are {', '.join(sorted(row)) or 'none'}")
    if not isinstance(row[name], list):
        raise JobError(f"{source}: {name}: expected an array, not {type(row[name]).__name__}")
    return list(row[name])


def _as_text(value: Any, name: str, source: str) -> str:
    if not isinstance(value, str):
        raise JobError(f"{source}: {name}: expected text, not {type(value).__name__}")
    return value


def _guessed(path: Path) -> Literal["alpaca", "sharegpt", "v1"]:
    """The format of a file that no `dataset_info.json` describes, by the first row's columns."""
    rows = read_rows(path)
    first = rows[0] if rows and isinstance(rows[0], dict) else {}
    if "messages" in first:
        return "v1"
    return "sharegpt" if "conversations" in first else "alpaca"


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise JobError(f"{path}: not JSON ({error})") from None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise JobError(f"{path}: cannot read the dataset ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise JobError(f"{path}: not UTF-8 ({error})") from None
