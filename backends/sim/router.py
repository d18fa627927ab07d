"""Which decode instance takes a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

RouterName = Literal["least_kv", "round_robin"]


class Loaded(Protocol):
    """What a router looks at."""

    def kv_load_tokens(self) -> int:
        """Tokens that the instance holds or has promised to hold."""
        ...


class Router:
    """Picks an index among the instances that serve: in turn, or with the fewest KV tokens (lowest index on a tie)."""

    def __init__(self, instances: Sequence[Loaded], name: RouterName) -> None:
        """At least one instance."""
        self._instances = instances
        self._name = name
        self._next = 0

    def pick(self) -> int:
        """The index for the next request."""
        if self._name == "round_robin":
            picked = self._next
            self._next = (picked + 1) % len(self._instances)
            return picked
        loads = [instance.kv_load_tokens() for instance in self._instances]
        return loads.index(min(loads))
