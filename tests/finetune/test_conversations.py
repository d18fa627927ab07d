"""LLaMA-Factory's data formats: what they mean, and one clear message for what is wrong in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backends.cuda.finetune.conversation import Message, read_datasets
from backends.cuda.finetune.tokens import ByteTokenizer, packed, samples_of
from harli_core.errors import JobError


def dataset(folder: Path, rows: Any, **info: Any) -> Path:
    """A data set ``d`` in ``folder``, with its entry; ``lines=True`` for lines of JSON."""
    lines = info.pop("lines", False)
    name = "d.jsonl" if lines else "d.json"
    text = "\n".join(json.dumps(row) for row in rows) if lines else json.dumps(rows)
    (folder / name).write_text(text)
    (folder / "dataset_info.json").write_text(json.dumps({"d": {"file_name": name, **info}}))
    return folder


def turns(folder: Path) -> list[tuple[str, str, bool]]:
    """Roles, texts and labels of its only row."""
    (found,) = read_datasets(folder, ["d"])
    return [(message.role, message.content, message.trained) for message in found.messages]


def test_alpaca_with_all_its_columns(tmp_path: Path) -> None:
    """Instruction and input make the question; history comes before it; the system column comes first."""
    row = {"ask": "add", "more": "1 2", "say": "3", "sys": "be brief", "old": [["hi", "hello"]]}
    columns = {"prompt": "ask", "query": "more", "response": "say", "system": "sys", "history": "old"}
    assert turns(dataset(tmp_path, [row], columns=columns)) == [
        ("system", "be brief", False),
        ("user", "hi", False),
        ("assistant", "hello", True),
        ("user", "add\n1 2", False),
        ("assistant", "3", True),
    ]


def test_alpaca_needs_no_entry_beyond_the_file_name(tmp_path: Path) -> None:
    """Columns have LLaMA-Factory's default names; an empty input adds no line; lines of JSON do as well."""
    row = {"instruction": "hi", "input": "", "output": "hello"}
    assert turns(dataset(tmp_path, [row], lines=True)) == [("user", "hi", False), ("assistant", "hello", True)]


def test_sharegpt_with_tools(tmp_path: Path) -> None:
    """Calls are trained on, observations are not; tools are read from their JSON text."""
    row = {
        "conversations": [
            {"from": "human", "value": "weather?"},
            {"from": "function_call", "value": '{"name": "w", "arguments": {}}'},
            {"from": "observation", "value": "sun"},
            {"from": "gpt", "value": "sunny"},
        ],
        "tools": '[{"name": "w"}]',
        "system": "be brief",
    }
    columns = {"messages": "conversations", "tools": "tools", "system": "system"}
    folder = dataset(tmp_path, [row], formatting="sharegpt", columns=columns)
    assert [role for role, _, _ in turns(folder)] == ["system", "user", "call", "tool", "assistant"]
    assert [trained for _, _, trained in turns(folder)] == [False, False, True, False, True]
    assert read_datasets(folder, ["d"])[0].tools == ({"name": "w"},)


def test_sharegpt_with_tags_of_its_own(tmp_path: Path) -> None:
    """OpenAI's names, a system turn in front."""
    names = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    row = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
        ]
    }
    info: dict[str, Any] = {
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {**names, "system_tag": "system"},
    }
    assert [role for role, _, _ in turns(dataset(tmp_path, [row], **info))] == ["system", "user", "assistant"]


def test_v1_lines_by_file_name(tmp_path: Path) -> None:
    """A file needs no entry; typed content is joined; the loss weight says what is trained on."""
    row = {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "value": "h"}, {"type": "text", "value": "i"}],
                "loss_weight": 0.0,
            },
            {"role": "assistant", "content": [{"type": "text", "value": "hello"}], "loss_weight": 0.0},
            {"role": "assistant", "content": [{"type": "text", "value": "there"}]},
        ]
    }
    (tmp_path / "v.jsonl").write_text(json.dumps(row))
    (found,) = read_datasets(tmp_path, ["v.jsonl"])
    assert found.messages == (
        Message("user", "hi", trained=False),
        Message("assistant", "hello", trained=False),
        Message("assistant", "there", trained=True),
    )


ALPACA = {"instruction": "a", "output": "b"}
TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
PART = [{"type": "text", "value": "a"}]


@pytest.mark.parametrize(
    ("rows", "info", "message"),
    [
        ([], {}, r"d.json: the dataset is empty"),
        ([{"instruction": "a"}], {}, r"d.json, row 1: no column 'output'; there are instruction"),
        ([ALPACA, {"instruction": 3, "output": "b"}], {}, r"row 2: instruction: expected text, not int"),
        ([ALPACA, "text"], {}, r"row 2: expected an object, not str"),
        ({"a": 1}, {}, r"d.json: expected an array of rows"),
        ([ALPACA], {"columns": {"history": "h"}}, None),
        ([{**ALPACA, "h": [["a"]]}], {"columns": {"history": "h"}}, r"row 1: h: expected pairs of question and answer"),
        ([{**ALPACA, "tools": "{"}], {}, r"row 1: tools: not JSON"),
        ([ALPACA], {"formatting": "pairs"}, r"dataset 'd' has formatting 'pairs', expected alpaca or sharegpt"),
        ([ALPACA], {"ranking": True}, r"holds preferences"),
        ([ALPACA], {"columns": {"images": "images"}}, r"has images; only text can be trained on"),
        ([{"conversations": "text"}], {"formatting": "sharegpt"}, r"conversations: expected an array, not str"),
        ([{"turns": TURNS}], {"formatting": "sharegpt"}, r"row 1: no column 'conversations'; there are turns"),
        ([{"conversations": TURNS[:1]}], {"formatting": "sharegpt"}, r"row 1: no turn of the assistant to train on"),
        (
            [{"conversations": TURNS[::-1]}],
            {"formatting": "sharegpt"},
            r"conversations 1: expected a question .* not 'gpt'",
        ),
        (
            [{"conversations": [{"from": "bot", "value": ""}]}],
            {"formatting": "sharegpt"},
            r"conversations 1: from is 'bot'",
        ),
        (
            [{"conversations": [*TURNS, {"from": "system", "value": "s"}]}],
            {"formatting": "sharegpt"},
            r"conversations 3: a system turn must be the first one",
        ),
    ],
)
def test_bad_rows_are_told_by_file_row_and_column(tmp_path: Path, rows: Any, info: Any, message: str | None) -> None:
    """One line that says what is wrong and where; an absent optional column is no fault."""
    folder = dataset(tmp_path, rows, **info)
    if message is None:
        assert len(read_datasets(folder, ["d"])) == 1
        return
    with pytest.raises(JobError, match=message):
        read_datasets(folder, ["d"])


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"role": "bot", "content": PART}, r"messages 1: role is 'bot'"),
        (
            {"role": "user", "content": [{"type": "image", "value": "x"}]},
            r"content of type 'image' cannot be trained on",
        ),
        ({"role": "user", "content": PART, "loss_weight": 0.5}, r"loss_weight is 0.5, expected 0 or 1"),
        ({"role": "user", "content": "a"}, r"content: expected an array, not str"),
    ],
)
def test_bad_v1_turns(tmp_path: Path, turn: Any, message: str) -> None:
    """The same for typed messages."""
    (tmp_path / "v.jsonl").write_text("\n" + json.dumps({"messages": [turn]}))
    with pytest.raises(JobError, match=message):
        read_datasets(tmp_path, ["v.jsonl"])


def test_bad_places(tmp_path: Path) -> None:
    """A missing folder, an unknown name, a set that would have to be downloaded, text that is no JSON."""
    with pytest.raises(JobError, match=r"dataset_info.json: cannot read the dataset \(No such file"):
        read_datasets(tmp_path, ["d"])
    dataset(tmp_path, [ALPACA])
    with pytest.raises(JobError, match=r"dataset 'e' is not in .* known are d"):
        read_datasets(tmp_path, ["e"])
    (tmp_path / "dataset_info.json").write_text(json.dumps({"h": {"hf_hub_url": "some/where"}}))
    with pytest.raises(JobError, match=r"dataset 'h' has no file_name, only hf_hub_url: download it first"):
        read_datasets(tmp_path, ["h"])
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{')
    with pytest.raises(JobError, match=r"x.jsonl, line 2: not JSON"):
        read_datasets(tmp_path, ["x.jsonl"])
    (tmp_path / "y.json").write_bytes(b"\xff")
    with pytest.raises(JobError, match=r"y.json: not UTF-8"):
        read_datasets(tmp_path, ["y.json"])


@pytest.mark.parametrize(
    ("name", "count", "roles"),
    [
        ("identity", 91, {"user", "assistant"}),
        ("alpaca_en_demo", 999, {"user", "assistant"}),
        ("glaive_toolcall_en_demo", 300, {"user", "assistant", "call", "tool"}),
        ("v1_sft_demo.jsonl", 500, {"user", "assistant"}),
    ],
)
def test_llama_factorys_own_files(shared: Path, name: str, count: int, roles: set[str]) -> None:
    """Its demonstration sets are read whole, rendered and packed; every sample has something to train on."""
    found = read_datasets(shared / "datasets_llamafactory", [name])
    assert len(found) == count
    assert {message.role for conversation in found for message in conversation.messages} == roles
    samples = samples_of(found, ByteTokenizer(), 4096, overlong="truncate")
    assert len(samples) == count
    rows = packed(samples, 4096, apart=True)
    assert sum(map(len, rows)) == sum(map(len, samples))
    assert max(map(len, rows)) <= 4096
    assert len(rows) < count / 2


def test_media_sets_of_llama_factory_are_refused(shared: Path) -> None:
    """Its image data set is refused by what it has, before its file is looked for."""
    with pytest.raises(JobError, match=r"dataset 'mllm_demo' has images"):
        read_datasets(shared / "datasets_llamafactory", ["mllm_demo"])
