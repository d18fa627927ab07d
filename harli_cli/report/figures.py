"""The figures of a report as plotly figures (plain data: traces and a layout), without colours of a theme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PALETTE = ("#4c78d8", "#e07b39", "#2f9e6e", "#b65fcf", "#c9a227", "#d1495b", "#3aa6b9", "#8a8f98")
"""Readable on white and on near-black."""

Figure = dict[str, Any]
Digests = Mapping[str, Mapping[str, Any]]


def run_figures(digest: Mapping[str, Any], summary: Mapping[str, Any]) -> list[Figure]:
    """The figures of one run."""
    config = summary["config"]
    one = {config["policy"]: digest}
    return [
        throughput(*_throughputs(summary)),
        latency_cdf(one, config["qos_ms"]),
        prediction_errors(one),
        memory(digest),
        sharing(digest),
        finetune_rate(one),
        worst_requests(digest["worst"], config),
    ]


def _throughputs(summary: Mapping[str, Any]) -> tuple[list[str], list[float], None]:
    """This run, and ``separate`` where ``--baselines`` ran it."""
    found = {summary["config"]["policy"]: summary["finetune"]["tokens_per_s"] or 0.0}
    if "baselines" in summary:
        found["separate"] = summary["baselines"]["separate"]["finetune_tokens_per_s"] or 0.0
    return list(found), list(found.values()), None


def compare_figures(rows: Sequence[Mapping[str, Any]], digests: Digests, config: Mapping[str, Any]) -> list[Figure]:
    """The figures of several policies; those over time are of the first seed."""
    means = [row["finetune_tokens_per_s"]["mean"] or 0.0 for row in rows]
    widths = [row["finetune_tokens_per_s"]["half_width"] or 0.0 for row in rows]
    figures = [
        throughput([str(row["policy"]) for row in rows], means, widths),
        latency_cdf(digests, config["qos_ms"]),
        prediction_errors(digests),
        finetune_rate(digests),
    ]
    for policy, digest in digests.items():
        figures += [memory(digest, policy), sharing(digest, policy)]
    return figures


def throughput(names: Sequence[str], values: Sequence[float], widths: Sequence[float] | None) -> Figure:
    """Fig. 11: finetune tokens a second, one bar a policy, 95 % intervals where there are several seeds."""
    bars: Figure = {
        "type": "bar", "orientation": "h", "y": list(names), "x": list(values), "name": "finetune tokens/s",
        "marker": {"color": [PALETTE[index % len(PALETTE)] for index in range(len(names))]},
        "text": [f"{value:,.0f}" for value in values], "textposition": "auto", "insidetextanchor": "middle",
        "hovertemplate": "%{y}: %{x:,.0f} tokens/s<extra></extra>",
    }  # fmt: skip
    if widths is not None and any(widths):
        bars["error_x"] = {"type": "data", "array": list(widths), "thickness": 1.5}
    layout = {
        "xaxis": {"title": {"text": "tokens of completed optimizer steps a second"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
        "height": 150 + 34 * len(names),
        "showlegend": False,
    }
    return _figure("throughput", "Finetune throughput", [bars], layout)


def latency_cdf(digests: Digests, qos_ms: float) -> Figure:
    """Share of steps at or below a latency, and the target."""
    traces = [
        {
            "type": "scatter", "mode": "lines", "name": name, "x": digest["cdf"]["latency_ms"],
            "y": digest["cdf"]["share"], "line": {"shape": "hv", "width": 2, "color": _colour(index)},
            "hovertemplate": "%{y:.2%} of steps within %{x:.2f} ms<extra>" + name + "</extra>",
        }
        for index, (name, digest) in enumerate(digests.items())
    ]  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "step latency, ms"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "share of steps"}, "tickformat": ".0%", "range": [0, 1.12]},
        "shapes": [_line(qos_ms)],
        "annotations": [
            {"x": qos_ms, "y": 1.0, "yref": "paper", "text": f"target {qos_ms:g} ms", "showarrow": False,
             "xanchor": "right", "yanchor": "top"}
        ],
    }  # fmt: skip
    return _figure("latency", "Step latency (CDF)", traces, layout)


def _line(x: float) -> Figure:
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": {"dash": "dash", "width": 1.5,
            "color": "#d1495b"}}  # fmt: skip


def prediction_errors(digests: Digests) -> Figure:
    """Fig. 12: error of the first step of each plan; boxes from quartiles, whiskers at 1 and 99 %."""
    traces: list[Figure] = []
    for index, (policy, digest) in enumerate(digests.items()):
        boxes = digest["errors"]
        if boxes:
            traces.append({
                "type": "box", "name": policy, "x": [box["name"] for box in boxes],
                "lowerfence": [box["low"] for box in boxes], "q1": [box["q1"] for box in boxes],
                "median": [box["median"] for box in boxes], "q3": [box["q3"] for box in boxes],
                "upperfence": [box["high"] for box in boxes], "marker": {"color": _colour(index)},
            })  # fmt: skip
    layout = {
        "yaxis": {"title": {"text": "predicted / measured - 1"}, "tickformat": ".1%", "zeroline": True},
        "boxmode": "group",
    }
    return _figure("errors", "Prediction error", traces, layout)


def memory(digest: Mapping[str, Any], policy: str | None = None) -> Figure:
    """Fig. 13: rows of KV and rows lent, the window of resident layers, the batch."""
    shown = (("rows_kv", "rows of KV", "y"), ("rows_lent", "rows lent", "y"), ("window_layers", "window, layers", "y2"),
             ("batch", "batch", "y2"))  # fmt: skip
    layout = {
        "xaxis": _time(),
        "yaxis": {"title": {"text": "rows an instance"}, "rangemode": "tozero"},
        "yaxis2": {"title": {"text": "layers, requests"},
                   "overlaying": "y", "tickmode": "auto", "side": "right", "rangemode": "tozero",
                   "showgrid": False},
    }  # fmt: skip
    return _figure(_id("memory", policy), _named("Memory, window and batch", policy), _lines(digest, shown), layout)


def sharing(digest: Mapping[str, Any], policy: str | None = None) -> Figure:
    """How SMs are split, and how much of a step is finetuning's turn."""
    shown = (("decode_sms", "SMs of decode", "y"), ("finetune_sms", "SMs of finetuning beside it", "y"),
             ("latency_ms", "step, ms", "y2"), ("turn_ms", "turn in it, ms", "y2"))  # fmt: skip
    layout = {
        "xaxis": _time(),
        "yaxis": {"title": {"text": "SMs"}, "rangemode": "tozero"},
        "yaxis2": {
            "title": {"text": "ms"},
            "overlaying": "y",
            "tickmode": "auto",
            "side": "right",
            "rangemode": "tozero",
            "showgrid": False,
        },
    }
    return _figure(_id("sharing", policy), _named("SM split and pacing", policy), _lines(digest, shown), layout)


def finetune_rate(digests: Digests) -> Figure:
    """Finetune tokens a second over time."""
    traces = [
        {
            "type": "scatter", "mode": "lines", "name": name, "x": digest["time_s"],
            "y": digest["series"]["finetune_tokens_per_s"], "line": {"width": 1.5, "color": _colour(index)},
        }
        for index, (name, digest) in enumerate(digests.items())
    ]  # fmt: skip
    layout = {"xaxis": _time(), "yaxis": {"title": {"text": "tokens/s, all GPUs"}, "rangemode": "tozero"}}
    return _figure("rate", "Finetune throughput over time", traces, layout)


def worst_requests(worst: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> Figure:
    """From arrival to last token, of the requests that were closest to a limit or furthest over one."""
    names = [f"request {one['request']}" for one in worst]
    parts = (("until the first token", [one["ttft_s"] for one in worst]),
             ("until the last token", [one["decode_s"] for one in worst]))  # fmt: skip
    about = [
        f"arrived at {one['arrival_s']:,.1f} s, {one['output_tokens']} tokens"
        + (f", TPOT {one['tpot_ms']:.1f} ms" if one["tpot_ms"] is not None else "")
        for one in worst
    ]
    traces = [
        {
            "type": "bar", "orientation": "h", "name": name, "y": names, "x": seconds, "customdata": about,
            "marker": {"color": _colour(index)},
            "hovertemplate": "%{y}<br>" + name + ": %{x:.2f} s<br>%{customdata}<extra></extra>",
        }
        for index, (name, seconds) in enumerate(parts)
    ]  # fmt: skip
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "seconds since arrival"}},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "height": 170 + 22 * len(names),
    }
    limits = f"limits: TTFT {config['ttft_slo_ms']:g} ms, TPOT {config['qos_ms']:g} ms"
    return _figure("requests", f"Worst requests ({limits})", traces, layout)


def _lines(digest: Mapping[str, Any], shown: Sequence[tuple[str, str, str]]) -> list[Figure]:
    return [
        {
            "type": "scatter", "mode": "lines", "name": name, "x": digest["time_s"], "y": digest["series"][key],
            "yaxis": axis, "line": {"width": 1.5, "color": _colour(index), "dash": "solid" if axis == "y" else "dot"},
        }
        for index, (key, name, axis) in enumerate(shown)
    ]  # fmt: skip


def _figure(identity: str, title: str, traces: list[Figure], layout: Figure) -> Figure:
    """``empty`` says why there is nothing to see, where there is not."""
    drawn = any(any(value is not None for value in trace.get("x", ())) for trace in traces)
    return {"id": identity, "title": title, "empty": not drawn, "data": traces, "layout": layout}


def _time() -> Figure:
    return {"title": {"text": "simulated time, s"}}


def _id(name: str, policy: str | None) -> str:
    return name if policy is None else f"{name}-{''.join(c if c.isalnum() else '-' for c in policy)}"


def _named(title: str, policy: str | None) -> str:
    return title if policy is None else f"{title}: {policy}"


def _colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]
