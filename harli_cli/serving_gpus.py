"""How many GPUs SeparateMode needs to serve: the fewest at which inference alone keeps its steps within target."""

from __future__ import annotations

from harli_cli.scenario import Scenario, Stage
from harli_core.config import RunConfig

KEPT_SHARE = 0.999
"""Share of steps that must be within the target."""


def serving_gpus(config: RunConfig, scenario: Scenario, stage: Stage) -> int:
    """Try 1, 2, .. GPUs under ``inference_only`` on this trace; all of them when none keeps the target."""
    for gpus in range(1, config.gpus):
        tried = Scenario(config.model_copy(update={"gpus": gpus}), loaded=scenario.loaded)
        progress = stage(f"inference_only on {gpus}", len(scenario.loaded.trace))
        outcome, _ = tried.run("inference_only", {}, progress=progress)
        steps = outcome.steps
        over = steps.solo_violations + steps.finetune_violations
        if not len(steps) or 1.0 - over / len(steps) >= KEPT_SHARE:
            return gpus
    return config.gpus
