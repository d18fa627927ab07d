"""``harli compare``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from harli_cli.file_clashes import check_clashes
from harli_cli.progress import progress
from harli_cli.settings import merged
from harli_core.errors import ConfigError


def compare(
    trace: Annotated[str | None, typer.Option(help="Trace file, or 'synthetic' [default: synthetic].")] = None,
    policies: Annotated[
        str | None, typer.Option(help="Names, separated by commas [default: the built-in ones].")
    ] = None,
    policy_option: Annotated[
        list[str] | None,
        typer.Option(
            "--policy-option",
            metavar="NAME=VALUE",
            help="Option of every policy that has it, or POLICY.NAME=VALUE of that one; repeatable.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each policy, with seeds from --seed on.")] = 5,
    seed: Annotated[int | None, typer.Option(help="The first seed [default: 0].")] = None,
    gpus: Annotated[
        str | None, typer.Option(help="Decode GPUs, or several numbers of them, separated by commas [default: 2].")
    ] = None,
    prefill_gpus: Annotated[int | None, typer.Option(help="Prefill GPUs; 0: none [default: 1].")] = None,
    serving_gpus: Annotated[int | None, typer.Option(help="GPUs that serve under 'separate'.")] = None,
    samples: Annotated[
        str | None,
        typer.Option(help="Samples that 'harli profile' wrote, to simulate that GPU [default: those that ship]."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Served model [default: llama3-8b].")] = None,
    finetune_model: Annotated[str | None, typer.Option(help="Finetuned model [default: the served one].")] = None,
    qos_ms: Annotated[float | None, typer.Option(help="Step latency target in ms [default: 40].")] = None,
    horizon_s: Annotated[float | None, typer.Option(help="Stop at this simulated time [default: all done].")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file as for 'harli run'; for all other options.")] = None,
    check: Annotated[
        list[str] | None,
        typer.Option(help="'POLICY.FIGURE > POLICY.FIGURE or number' on means over seeds; exit code 1 if it fails."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes [default: one a core].")] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for compare.json and report.html, and for summary.json, requests.parquet and steps.parquet of each "
            "policy, in a folder of its name: of the first seed only. With several numbers of GPUs, all of that in a folder "
            "gpus_N for each."
        ),
    ] = Path("out"),
    html: Annotated[bool, typer.Option("--html/--no-html", help="Write report.html.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of a table.")] = False,
) -> None:
    """Run policies side by side over several seeds: means, 95 % intervals, gains, and the best within the target."""
    from harli_cli.comparison.command import Comparison, failed, written  # noqa: PLC0415
    from harli_cli.comparison.command import compare as run_comparison  # noqa: PLC0415
    from harli_cli.provenance import typed_command  # noqa: PLC0415
    from policies import POLICIES  # noqa: PLC0415

    options = {
        "trace": trace, "seed": seed, "prefill_gpus": prefill_gpus, "serving_gpus": serving_gpus,
        "samples": samples, "model": model, "finetune_model": finetune_model, "qos_ms": qos_ms, "horizon_s": horizon_s,
    }  # fmt: skip
    names = list(POLICIES) if policies is None else [name.strip() for name in policies.split(",")]
    counts = _counts(gpus)
    places = {
        out if len(counts) == 1 else out / f"gpus_{count}": merged(
            config, {**options, "gpus": count}, policy_option or []
        )
        for count in counts
    }
    settings, *_ = places.values()
    read = (settings.trace, settings.profile, settings.samples, config)
    check_clashes(
        [Path(path) for path in read if path],
        [("--out", path) for place in places for path in written(place, list(dict.fromkeys(names)), html)],
    )
    command = typed_command(sys.argv[1:], settings.trace)
    with progress() as stage:
        documents = [
            run_comparison(Comparison(one, names, seeds, check or [], jobs, command), place, html, stage)
            for place, one in places.items()
        ]
    if as_json:
        typer.echo(json.dumps(documents if len(counts) > 1 else documents[0], indent=2, sort_keys=True))
    else:
        where = ", ".join(f"{place}/compare.json" for place in places)
        _show(documents, f"{where}{', report.html' if html else ''}, results of seed {settings.seed} by policy")
    if any(failed(document) for document in documents):
        raise typer.Exit(1)


def _counts(gpus: str | None) -> list[int | None]:
    """The numbers of GPUs that are asked for, in order; `None` where that is left to the configuration."""
    if gpus is None:
        return [None]
    words = [word.strip() for word in gpus.split(",")]
    counts: list[int | None] = [int(word) for word in words if word.isascii() and word.isdecimal()]
    if len(set(counts)) != len(words):
        raise ConfigError(f"--gpus {gpus}: expected a whole number, or different ones separated by commas")
    return counts


def _show(documents: Sequence[Mapping[str, Any]], written: str) -> None:
    from harli_cli.comparison.table import comparison_table  # noqa: PLC0415

    console = Console(width=None if sys.stdout.isatty() else 220)
    console.print(comparison_table(documents))
    for document in documents:
        gpus = document["config"]["gpus"]
        _remark(console, document, f" on {gpus} GPU{'s' * (gpus > 1)}" if len(documents) > 1 else "")
    console.print(f"written: {written}", highlight=False, soft_wrap=True)


def _remark(console: Console, document: Mapping[str, Any], where: str) -> None:
    """What follows from one comparison; ``where`` tells it from others."""
    from harli_cli.remarks import overload_warning, trust_warning  # noqa: PLC0415

    best = document["best_within_target"] or "none kept it"
    console.print(f"best within the target{where}: {best}", highlight=False)
    for line in (*overload_warning(document["rows"]), *trust_warning(document["rows"])):
        console.print(line.replace("warning", f"warning{where}", 1), highlight=False, soft_wrap=True)
    for verdict in document["checks"]:
        sides = " and ".join(
            "nothing" if verdict[side] is None else f"{verdict[side]:,.6g}" for side in ("left", "right")
        )
        said = f"{'holds' if verdict['holds'] else 'FAILS'}{where}"
        console.print(f"{said}: {verdict['check']} ({sides})", highlight=False, soft_wrap=True, markup=False)
