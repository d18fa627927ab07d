"""What a scenario hands to policies."""

from __future__ import annotations

from harli_cli.scenario import Scenario
from harli_core.config import RunConfig
from harli_core.predict.profile import Profile


def test_policies_of_a_gpu_run_see_the_graphs_that_it_has() -> None:
    """The shipped profile names no sizes; those of the decoder at hand go to the policies and into the log's header."""
    scenario = Scenario(RunConfig())
    assert scenario.profile.graph_batches == ()
    scenario.on_graphs([1, 8, 64])
    assert scenario.profile.graph_batches == scenario.contexts.profile.graph_batches == (1, 8, 64)
    header = scenario.contexts.header("hybrid", {})
    assert Profile.from_dict(header["profile"], "header").graph_batches == (1, 8, 64)
