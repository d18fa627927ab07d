"""How many GPUs SeparateMode needs to serve: the fewest at which inference alone keeps its steps within target."""

from __future__ import annotations

from backends.sim.device_model import DeviceModel
from backends.sim.simulation import SimOutcome
from harli_cli.scenario import Scenario, Stage

KEPT_SHARE = 0.999
"""Share of steps that must be within the target."""


def fewest_serving(scenario: Scenario, stage: Stage) -> tuple[int, SimOutcome, DeviceModel]:
    """Run ``separate`` with 1, 2, .. GPUs that serve, until they keep the target; all of them when no number does.

    Gives that number and its run. Those GPUs step as they would under ``inference_only`` with no others beside them, so
    the run that answers the question is also the one that was asked for.
    """
    total, serving = len(scenario.loaded.trace), 0
    while True:
        serving += 1
        progress = stage(f"separate, {serving} serving", total)
        outcome, device = scenario.run("separate", {"serving_gpus": serving}, progress=progress)
        steps = outcome.steps
        over = steps.solo_violations + steps.finetune_violations
        if serving == scenario.config.gpus or not len(steps) or 1.0 - over / len(steps) >= KEPT_SHARE:
            return serving, outcome, device
