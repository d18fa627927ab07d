"""``harli profile`` measures a GPU, ``harli fit`` turns the samples into a profile, ``--profile`` loads it again."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harli_core.errors import ConfigError, SampleError
from harli_core.model import model_shape
from harli_core.predict.fit import fit_profile
from harli_core.predict.profile import Profile
from harli_core.predict.samples import Samples, parse_samples
from traces.whole_file import replace_text, replaceable

INSTEAD = (
    "simulate the GPU that ships (harli run), or one that was measured elsewhere: "
    "harli run --samples FILE, harli fit FILE PROFILE"
)
"""What there is to do without a GPU."""

BUDGET_S = 295.0
"""For all of ``harli profile``, loading included: five minutes, and something to write the file in."""

CONTEXT_TOKENS = 16384
"""Room for the longest prompt that is measured, and its answer."""


def read_profile(path: Path) -> Profile:
    """A fitted profile; raises `SampleError` naming the file for anything that is none."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SampleError(f"{path}: cannot read the profile ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise SampleError(f"{path}: not a profile written by 'harli fit' ({error})") from None
    if not isinstance(value, dict):
        raise SampleError(f"{path}: not a profile written by 'harli fit'")
    return Profile.from_dict(value, str(path))


def read_samples(path: Path) -> Samples:
    """Samples that 'harli profile' wrote; raises `SampleError` naming the file for anything that is none."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise SampleError(f"{path}: cannot read the samples ({error.strerror})") from None
    except UnicodeDecodeError:
        raise SampleError(f"{path}: not a text file of samples") from None
    return parse_samples(lines, path.name)


def fit_samples(samples: Path, finetune_model: str | None, out: Path) -> Profile:
    """Fit and write; raises `SampleError` for samples that are incomplete, `ConfigError` where ``out`` cannot be written."""
    parsed = read_samples(samples)
    if finetune_model is None:
        found = sorted({sample.finetune_model for sample in parsed.colocated})
        if len(found) != 1:
            raise ConfigError(
                f"{samples}: samples beside {', '.join(found) or 'no finetuned model'}; choose with --finetune-model"
            )
        finetune_model = found[0]
    profile = fit_profile(parsed, finetune_model)
    replace_text(out, json.dumps(profile.to_dict(), indent=1, sort_keys=True) + "\n")
    return profile


def measure(model: str, finetune_model: str, out: Path, unit_tokens: int, say: Callable[[str], None]) -> int:
    """Measure this machine's GPU with random weights; returns how many samples were written to ``out``."""
    from backends.cuda.requirements import require  # noqa: PLC0415

    model_shape(model)
    model_shape(finetune_model)
    check_place(out)
    require("harli profile, which measures a GPU,", INSTEAD)
    lines = _lines(model, finetune_model, unit_tokens, say)
    replace_text(out, "".join(json.dumps(line) + "\n" for line in lines))
    return len(lines)


def check_place(out: Path) -> None:
    """Prove that a file can be written there, before minutes of measuring and not after; raises `ConfigError`."""
    try:
        with tempfile.TemporaryFile(dir=replaceable(out).parent):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None


def _lines(model: str, finetune_model: str, unit_tokens: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    import torch  # noqa: PLC0415

    from backends.cuda.serving.bench import InstanceBench  # noqa: PLC0415
    from backends.cuda.serving.instance import Instance  # noqa: PLC0415
    from backends.cuda.serving.job_source import JobSettings  # noqa: PLC0415
    from backends.cuda.serving.model_folder import dummy_folder, shipped_config  # noqa: PLC0415
    from backends.cuda.serving.profiler import QUICK, Profiler  # noqa: PLC0415
    from backends.cuda.serving.scheduler_factory import GRAPH_BATCHES, ServingSettings  # noqa: PLC0415
    from harli_cli.package_data import shipped_profile  # noqa: PLC0415
    from harli_core.memory.geometry import GridGeometry  # noqa: PLC0415
    from harli_core.predict.predictor import StepPredictor  # noqa: PLC0415

    begin_s = time.perf_counter()
    needed = QUICK.most_kv_tokens + 256 * max(QUICK.batches)
    grid = GridGeometry.of(model_shape(model), 2**40)
    rows = -(-2 * needed // grid.row_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        settings = ServingSettings(
            dummy_folder(shipped_config(model), CONTEXT_TOKENS, Path(scratch)),
            rows * grid.row_tokens,
            max(QUICK.batches),
            CONTEXT_TOKENS,
            load_format="dummy",
            dtype="bfloat16",
        )
        # Unit durations of the shipped profile only pace the launches; nothing of them enters the samples.
        pace = StepPredictor(shipped_profile("h200", model, finetune_model))
        instance = Instance(settings, pace, "elsewhere")
        shared = model == finetune_model
        instance.add_job(JobSettings(shipped_config(finetune_model), unit_tokens, 2, shared=shared))
        instance.warm_up()
        say(f"ready to measure after {time.perf_counter() - begin_s:.0f} s")
        gpu = torch.cuda.get_device_name()
        driver = int(str(torch.version.cuda).split(".")[0]) * 1000
        layers = shipped_config(model)["num_hidden_layers"]
        device = {
            "gpu": gpu, "driver": driver, "torch": torch.__version__, "model": model, "layers": layers,
            "graph_batches": list(GRAPH_BATCHES),
        }  # fmt: skip
        left_s = BUDGET_S - (time.perf_counter() - begin_s)
        profiler = Profiler(InstanceBench(instance), replace(QUICK, budget_s=left_s))
        found = []
        with instance.on_stream():
            for line in profiler.lines(device, finetune_model):
                found.append(line)
                if len(found) % 25 == 0:
                    say(f"{len(found)} samples after {time.perf_counter() - begin_s:.0f} s")
    if profiler.uncertainty is not None:
        say(
            f"{len(profiler.measured)} operating points; the predictor is sure to {profiler.uncertainty:.1%} at the next one"
        )
    say(f"measured {len(found)} samples in {time.perf_counter() - begin_s:.0f} s")
    return found
