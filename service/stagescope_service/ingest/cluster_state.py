"""Whether the head of the Ray cluster answers, and which nodes it lists. No Ray in here.

Actors run on when the head's GCS is gone: they answer each other and HTTP for about a minute, until
Ray ends them. If the GCS is backed by Redis, a new one takes over meanwhile.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

FAILED_SECONDS: Final = 2.0
"""How long calls fail until the head counts as gone,"""
PENDING_SECONDS: Final = 20.0
"""and how long one may wait for its answer on a busy machine."""
_CONNECT_SECONDS: Final = 2.0


class HeadWatch:
    """Notes whether the calls to the head succeed; used from one event loop, except `check`.

    Args:
        address: address of the GCS, host:port.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._since: float | None = None
        """When the first unanswered call began; monotonic seconds."""
        self._reason = ""

    def check(self) -> None:
        """Raise OSError if nothing listens: Ray itself would wait for a minute."""
        host, _, port = self.address.rpartition(":")
        if port.isdecimal():
            at = (host.strip("[]"), int(port))
            socket.create_connection(at, timeout=_CONNECT_SECONDS).close()

    def asked(self, now: float) -> None:
        """Note that a call begins."""
        if self._since is None:
            self._since = now

    def answered(self) -> None:
        """Note that the call succeeded."""
        self._since, self._reason = None, ""

    def failed(self, reason: str) -> bool:
        """Note that the call failed; return whether the reason is news."""
        is_news, self._reason = reason != self._reason, reason
        return is_news

    def problem(self, now: float) -> str:
        """Return the problem of the head; "" while it answers.

        Args:
            now: the monotonic clock, seconds.
        """
        patience = FAILED_SECONDS if self._reason else PENDING_SECONDS
        if self._since is None or (seconds := now - self._since) < patience:
            return ""
        reason = self._reason or "the call is not answered"
        return (
            f"the head at {self.address} has not answered for {seconds:.0f} s ({reason}). Events "
            "are still recorded. Unless the head comes back, Ray ends the service about a minute "
            "after the head died. `stagescope serve` starts the service again with the same data"
        )


class ActorDeath(NamedTuple):
    """The death of an actor's process that Ray did not cause."""

    wall: float
    """When Ray noticed it; Unix seconds."""
    reason: str


_WORKER_DIED: Final = 1
"""Ray's ActorDiedErrorContext.WORKER_DIED; an actor that ends with its driver has another one."""
_OWN_DEATHS: Final = ("SYSTEM_ERROR", "USER_ERROR", "NODE_OUT_OF_MEMORY")
"""Ray's types of a worker's exit that neither Ray nor the training asked for."""
_REASON_CHARACTERS: Final = 300


def own_deaths(actors: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], ActorDeath]:
    """Return (node id, process id) -> death, of those actors of Ray's table that died alone."""
    found: dict[tuple[str, int], ActorDeath] = {}
    for actor in actors:
        cause = actor["DeathCause"]
        killed, out_of_memory = cause.actor_died_error_context, cause.oom_context
        reason = str(out_of_memory.error_message)
        if killed.reason == _WORKER_DIED and any(
            f"exit type: {each}" in killed.error_message for each in _OWN_DEATHS
        ):
            reason = str(killed.error_message)
        if reason:
            text = " ".join(reason.partition(" Some common causes include")[0].split())
            at = (str(actor["Address"]["NodeID"]), int(actor["Pid"]))
            found[at] = ActorDeath(actor["EndTime"] / 1000.0, text[:_REASON_CHARACTERS])
    return found


LIST_SECONDS: Final = 2.0
"""Seconds after which the list is old."""
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
        return time.monotonic() - self._looked > LIST_SECONDS

    def is_due_for(self, node_ids: Iterable[str | None]) -> bool:
        """Return whether to read the list before a question about these nodes."""
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
