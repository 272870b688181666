"""The nodes of the Ray cluster, as of its newest list. No Ray in here."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

SECONDS: Final = 2.0
"""Age from which the list is old."""
_PLANNED_DEATHS: Final = (1, 4)
"""Ray's EXPECTED_TERMINATION and AUTOSCALER_DRAIN_IDLE."""


class NodeList:
    """Which nodes live, and which the cluster lost; only `look` asks the cluster.

    Args:
        read: returns Ray's list of nodes; may wait for the head.
    """

    def __init__(self, read: Callable[[], list[dict[str, Any]]]) -> None:
        self.alive: set[str] = set()
        self.lost: dict[str, str] = {}
        """The nodes that the cluster lost, and why each."""
        self._read = read
        self._looked = -math.inf
        self._looking = threading.Lock()
        self._is_doubtful = True

    def is_due(self) -> bool:
        """Return whether the list is old."""
        return time.monotonic() - self._looked > SECONDS

    def is_due_for(self, node_ids: Iterable[str | None]) -> bool:
        """Return whether the list is to be read before something is asked about these nodes."""
        unknown = any(each is not None and each not in self.alive for each in node_ids)
        return self._is_doubtful or (unknown and self.is_due())

    def doubt(self) -> None:
        """Note that a call to a node failed: the list is old."""
        self._looked, self._is_doubtful = -math.inf, True

    def look(self) -> None:
        """Read the list, unless another thread does so; the first time, every thread waits."""
        if not self._looking.acquire(blocking=not self.alive):
            return
        try:
            if self.alive and not self.is_due():  # read while this thread waited
                return
            nodes = self._read()
            self.alive = {node["NodeID"] for node in nodes if node["Alive"]}
            self.lost = {node["NodeID"]: _death(node) for node in nodes if _is_lost(node)}
            self._looked, self._is_doubtful = time.monotonic(), False
        finally:
            self._looking.release()


def _is_lost(node: Mapping[str, Any]) -> bool:
    return not node["Alive"] and node.get("DeathReason") not in _PLANNED_DEATHS


def _death(node: Mapping[str, Any]) -> str:
    """Return why a node of Ray's list is dead."""
    return str(node.get("DeathReasonMessage") or "Ray does not say why")
