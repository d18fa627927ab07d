"""Every cell of the co-location benchmark, as data: what is to be measured, in the order of what matters most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

POLICIES = (
    "hybrid",
    "separate_finetuning",
    "harli",
    "inference_only",
    "separate_serving",
    "static_split",
    "pause_on_load",
)
"""``separate`` is measured as its two halves: a GPU that only serves, with twice the load, and one that only finetunes."""

RUN_AS = {"separate_serving": "inference_only", "separate_finetuning": "separate"}
"""The policies that its halves run under."""

WARM_UP_S = 25.0
WINDOW_S = 30.0
SOLO_FACTOR = 1.3
"""The tightest target: so many times the median step of ``inference_only`` at the same load."""


@dataclass(frozen=True, slots=True)
class Group:
    """Cells that one process can measure: a pair of models in a memory. ``shared``: one copy of equal weights."""

    served: str
    finetuned: str
    memory_gb: float | None = None
    shared: bool = True

    @property
    def pair(self) -> str:
        """Served and finetuned model."""
        return f"{self.served}__{self.finetuned}"

    @property
    def kind(self) -> str:
        """What is unusual about memory, as a suffix."""
        capped = "" if self.memory_gb is None else f"_{self.memory_gb:g}gb"
        return capped + ("_unshared" if self.served == self.finetuned and not self.shared else "")

    @property
    def name(self) -> str:
        """One word for it."""
        return self.pair + self.kind


@dataclass(frozen=True, slots=True)
class Point:
    """A load and a target (`None`: `SOLO_FACTOR` times solo), and how long is measured after the warm-up."""

    load_tokens_per_s: int
    target_ms: float | None
    window_s: float = WINDOW_S
    policies: Sequence[str] = POLICIES

    def offered_tokens_per_s(self, policy: str) -> float:
        """The GPU that only serves has the load of two."""
        return self.load_tokens_per_s * (2.0 if policy == "separate_serving" else 1.0)

    @property
    def name(self) -> str:
        """As in the names of result files."""
        target = f"{SOLO_FACTOR:g}xsolo" if self.target_ms is None else f"{self.target_ms:g}ms"
        return f"{self.load_tokens_per_s}tps_{target}" + ("" if self.window_s == WINDOW_S else f"_{self.window_s:g}s")


LLAMA, QWEN = "llama3-8b", "qwen2.5-7b"
HEADLINE = Point(1600, 40.0)

PLAN: dict[Group, tuple[Point, ...]] = {
    Group(LLAMA, LLAMA): (
        HEADLINE,
        Point(400, 40.0),
        Point(3200, 40.0),
        Point(1600, 25.0),
        Point(1600, 15.0),
        Point(1600, None),
        Point(1600, 40.0, window_s=600.0, policies=("hybrid",)),
    ),
    Group(LLAMA, QWEN): (HEADLINE,),
    Group(QWEN, LLAMA): (HEADLINE,),
    Group(QWEN, QWEN): (HEADLINE,),
    Group(LLAMA, LLAMA, shared=False): (HEADLINE,),
    Group(LLAMA, LLAMA, memory_gb=48.0, shared=False): (HEADLINE,),
}
"""The table: primary pairs, then loads, targets and the tail of the first, then memory."""


def gains_of(rates: Mapping[str, float | None]) -> dict[str, float]:
    """Finetune throughput of two GPUs that do both over that of one that serves and one that finetunes, minus 1."""
    alone = rates.get("separate_finetuning")
    if not alone:
        return {}
    return {name: 2.0 * rate / alone - 1.0 for name, rate in rates.items() if rate and not name.startswith("separate")}


def group_of(name: str) -> Group:
    """The group of that name; raises `ValueError` with the names that there are."""
    found = {group.name: group for group in PLAN}
    if name not in found:
        raise ValueError(f"no group {name!r}; there are {', '.join(found)}")
    return found[name]


def result_name(group: Group, point: Point) -> str:
    """Name of the file that holds the cells of a point, without its ending."""
    return f"{group.pair}_{point.name}{group.kind}"
