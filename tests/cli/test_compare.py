"""`harli compare`: the table, statistics, checks, exit codes, and what happens to processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harli_cli.comparison.checks import judge, read_check
from harli_cli.comparison.statistics import best, interval
from harli_cli.comparison.workers import run_all
from harli_cli.provenance import commit, machine
from harli_core.errors import ConfigError, WorkerError


def test_rows_are_the_runs(harli: Any, trace: Path) -> None:
    """Each value of the comparison is what `harli run` gives for that policy and seed; gains are their quotients."""
    common = ("--trace", trace, "--gpus", "2")
    done = harli("compare", *common, "--policies", "hybrid", "--seeds", "2", "--no-html", "--json", "--out", "c")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    assert document == json.loads(Path("c/compare.json").read_text())
    assert (document["requests"], document["config"]["trace"]) == (3, "three.csv")
    (row,) = document["rows"]
    for index, seed in enumerate(("0", "1")):
        tokens = {}
        for policy in ("hybrid", "separate", "static_split"):
            summary = json.loads(harli("run", *common, "--policy", policy, "--seed", seed, "--json").out)
            tokens[policy] = summary["finetune"]["tokens_per_s"]
            if policy == "hybrid":
                assert row["step_p99_ms"]["values"][index] == summary["steps"]["latency_ms"]["p99"]
        assert row["finetune_tokens_per_s"]["values"][index] == tokens["hybrid"]
        for other in ("separate", "static_split"):
            expected = tokens["hybrid"] / tokens[other] - 1.0 if tokens[other] else None
            assert row[f"gain_over_{other}"]["values"][index] == expected


def test_origin(harli: Any, trace: Path) -> None:
    """The result says which command made it, on which machine and of which code; of the trace's path only its name."""
    done = harli(
        "compare",
        f"--trace={trace}",
        "--policies",
        "hybrid",
        "--seeds",
        "1",
        "--no-html",
        "--check",
        "hybrid.steps > 0",
    )
    document = json.loads(Path("out/compare.json").read_text())
    assert (done.code, document["command"]) == (
        0, "harli compare --trace=three.csv --policies hybrid --seeds 1 --no-html --check 'hybrid.steps > 0'",
    )  # fmt: skip
    assert document["machine"] == machine()
    assert document["commit"] == commit()
    assert str(trace.parent) not in json.dumps(document)


def test_results_of_the_first_seed(harli: Any, trace: Path) -> None:
    """They are those of `harli run`, in a folder a policy; no other seed leaves any, nor does a baseline not asked for."""
    common = ("--trace", trace, "--gpus", "2", "--seed", "3")
    harli("compare", *common, "--policies", "hybrid,harli", "--seeds", "2", "--no-html")
    files = {str(path.relative_to("out")) for path in Path("out").rglob("*") if path.is_file()}
    names = ("summary.json", "requests.parquet", "steps.parquet")
    assert files == {"compare.json", *(f"{policy}/{name}" for policy in ("hybrid", "harli") for name in names)}
    harli("run", *common, "--policy", "harli", "--out", "alone")
    for name in names:
        assert Path("alone", name).read_bytes() == Path("out/harli", name).read_bytes()


def test_several_numbers_of_gpus_are_compared_one_after_the_other(harli: Any, trace: Path) -> None:
    """Each as if asked for alone, in a folder of its own; the table has a column more, and every number its best policy."""
    common = ("--trace", trace, "--policies", "hybrid,inference_only", "--seeds", "1", "--no-html")
    assert harli("compare", *common, "--gpus", "2", "--out", "two").code == 0
    shown = harli("compare", *common, "--gpus", "1, 2", "--check", "hybrid.steps > 0").out
    documents = json.loads(harli("compare", *common, "--gpus", "1,2", "--json").out)
    assert [document["config"]["gpus"] for document in documents] == [1, 2]
    assert documents[1]["rows"] == json.loads(Path("two/compare.json").read_text())["rows"]
    for document, folder in zip(documents, ("out/gpus_1", "out/gpus_2"), strict=True):
        assert json.loads(Path(folder, "compare.json").read_text()) == document
        assert {path.name for path in Path(folder).iterdir()} == {"compare.json", "hybrid", "inference_only"}
    rows = [line.split("│")[1:3] for line in shown.splitlines() if line.startswith("│")]
    assert [(gpus.strip(), policy.strip()) for gpus, policy in rows] == [
        ("1", "hybrid"), ("1", "inference_only"), ("2", "hybrid"), ("2", "inference_only")
    ]  # fmt: skip
    assert "best within the target on 1 GPU: hybrid" in shown
    assert "holds on 2 GPUs: hybrid.steps > 0" in shown
    assert "out/gpus_1/compare.json, out/gpus_2/compare.json" in shown


@pytest.mark.parametrize("gpus", ["", "two", "1,", "1,1", "01,1", "1;2", "-1", "1.5", "0", "1,0", "²"])
def test_numbers_of_gpus_that_are_none_are_refused(harli: Any, trace: Path, gpus: str) -> None:
    """Before anything runs, with the option's name."""
    assert "gpus" in harli("compare", "--trace", trace, f"--gpus={gpus}").error()
    assert not Path("out").exists()


def test_options_reach_the_policies_that_have_them(harli: Any, trace: Path) -> None:
    """A name is for all that have it, after the name of a policy for that one alone; the rows say who got what."""
    common = ("compare", "--trace", trace, "--seeds", "1", "--no-html", "--json", "--policies")
    options = ("hysteresis=0.5", "harli.hold_steps=8", "harli.hysteresis=0.25")
    document = json.loads(harli(*common, "harli,hybrid,inference_only", *_options(options)).out)
    assert [row["policy_options"] for row in document["rows"]] == [
        {"hysteresis": 0.25, "hold_steps": 8}, {"hysteresis": 0.5}, {}
    ]  # fmt: skip
    summary = json.loads(Path("out/harli/summary.json").read_text())
    assert summary["config"]["policy_options"] == {"hysteresis": 0.25, "hold_steps": 8}


def test_options_of_a_configuration_file(harli: Any, trace: Path) -> None:
    """Its table [policy_options] is dealt out the same way."""
    Path("c.toml").write_text('[policy_options]\nhold_steps = 4\n"hybrid.margin" = 0.1\n')
    command = ("compare", "--trace", trace, "--seeds", "1", "--no-html", "--json", "--config", "c.toml")
    document = json.loads(harli(*command, "--policies", "hybrid,harli").out)
    assert [row["policy_options"] for row in document["rows"]] == [{"hold_steps": 4, "margin": 0.1}, {"hold_steps": 4}]


@pytest.mark.parametrize(
    "option", ["nobody=1", "harli.margin=1", "separate.serving_gpus=1", "hold_steps", "hybrid.margin=often"]
)
def test_an_option_that_fits_no_policy_is_refused(harli: Any, trace: Path, option: str) -> None:
    """Before anything runs, by its name."""
    done = harli("compare", "--trace", trace, "--policies", "hybrid,harli", *_options([option]))
    assert option.partition("=")[0].rpartition(".")[2] in done.error()


def _options(pairs: Sequence[str]) -> list[str]:
    return [word for pair in pairs for word in ("--policy-option", pair)]


@pytest.mark.parametrize(("check", "code"), [("hybrid.steps > 0", 0), ("hybrid.steps < 1", 1)])
def test_a_check_sets_the_exit_code(harli: Any, trace: Path, check: str, code: int) -> None:
    """1 when it fails, and the result is written all the same."""
    done = harli("compare", "--trace", trace, "--policies", "hybrid", "--seeds", "1", "--no-html", "--check", check)
    assert done.code == code
    assert ("FAILS" in done.out) == bool(code)
    assert {path.name for path in Path("out").iterdir()} == {"compare.json", "hybrid"}


@pytest.mark.parametrize(
    "check",
    ["", "hybrid.steps", "hybrid.steps > ", "1 < 2", "hybrid.stepz > 1", "other.steps > 1", "hybrid.steps = 1",
     "hybrid.steps > 1 > 0", "hybrid.steps > __import__('os')", "hybrid.steps > nan", "hybrid.steps => 1"],
)  # fmt: skip
def test_a_faulty_check_is_refused(harli: Any, trace: Path, check: str) -> None:
    """Before anything runs, with the text of the check."""
    assert "--check" in harli("compare", "--trace", trace, "--policies", "hybrid", "--check", check).error()


@given(st.text(max_size=40))
def test_any_text_is_a_check_or_refused(text: str) -> None:
    """No other exception, whatever is written."""
    try:
        check = read_check(text, ("hybrid",))
    except ConfigError:
        return
    assert check.text == text


def test_a_figure_that_is_missing_fails_its_check() -> None:
    """No value is neither more nor less than anything."""
    for sign in ("<", ">=", "!="):
        assert not judge(read_check(f"hybrid.steps {sign} 1", ("hybrid",)), {"hybrid": {"steps": None}}).holds


def test_interval_of_five() -> None:
    """Student's quantile for four degrees of freedom is 2.776."""
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found["mean"] == 3.0
    assert found["half_width"] == pytest.approx(2.776445 * (2.5 / 5) ** 0.5, rel=1e-6)
    assert interval([7.0]) == {"mean": 7.0, "half_width": None}


def test_best_keeps_the_target() -> None:
    """The fastest that violates does not count; nor is anything best where none keeps it."""
    fast = {"policy": "fast", "keeps_target": False, "finetune_tokens_per_s": {"mean": 9.0}}
    slow = {"policy": "slow", "keeps_target": True, "finetune_tokens_per_s": {"mean": 2.0}}
    assert best([fast, slow]) == "slow"
    assert best([fast]) is None


def _die_on_three(task: int) -> int:
    if task == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return task * 2


def test_a_dead_worker_names_its_task() -> None:
    """Killed in the middle: the error names exactly the task that it had, and how it died."""
    with pytest.raises(WorkerError, match=r"^3: its process died \(SIGKILL"):
        run_all([1, 2, 3, 4], _die_on_three, 2, lambda _task: None)


def test_answers_keep_the_order_of_tasks() -> None:
    """Whichever process is done first."""
    assert run_all([5, 1, 2], _die_on_three, 2, lambda _task: None) == [10, 2, 4]


def _sleep(task: tuple[str, float]) -> float:
    time.sleep(task[1])
    return task[1]


def test_what_takes_longest_goes_first_once_it_is_known() -> None:
    """One of each kind in order (the first starts the process), then the slow kind's other, then the quick one's."""
    tasks = [("first", 0.0), ("quick", 0.001), ("slow", 0.5), ("quick", 0.002), ("slow", 0.501)]
    order: list[tuple[str, float]] = []
    assert run_all(tasks, _sleep, 1, order.append, lambda task: task[0]) == [0.0, 0.001, 0.5, 0.002, 0.501]
    assert order == [tasks[0], tasks[1], tasks[2], tasks[4], tasks[3]]


def _workers(pid: int) -> set[int]:
    """The processes that ``pid`` has started for scenarios."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            command = (path.parent / "cmdline").read_text()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z" and "popen_loky" in command:
            found.add(int(path.parent.name))
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_interrupt_leaves_nothing(workers: int, tmp_path: Path) -> None:
    """Ctrl-C, which every process of the terminal gets: exit code 130, one line, no file, no process."""
    command = [sys.executable, "-m", "harli_cli", "compare", "--seeds", "3", "--jobs", "2", "--out", "result"]
    seen: set[int] = set()
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            while len(seen) < workers and process.poll() is None:
                time.sleep(0.01)
                seen |= _workers(process.pid)
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, out) == (130, b"")
    assert err == b"harli: interrupted; nothing unfinished is left behind\n"
    assert list(tmp_path.rglob("*")) == []
    for _ in range(600):
        if not any(Path(f"/proc/{worker}").exists() for worker in seen):
            break
        time.sleep(0.1)
    assert not [worker for worker in seen if Path(f"/proc/{worker}").exists()]
