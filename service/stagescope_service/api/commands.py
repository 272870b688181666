"""What the API asks of the engine: it reads the store itself, and changes nothing in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Reply = dict[str, Any]


class Commands(Protocol):
    """The coordinator's calls, as the routes make them.

    Each is made on the server's event loop and must not block it. A reply with `not_ready` says
    that nothing was taken. An error of `stagescope.errors` becomes the answer's problem; where
    the coordinator cannot be reached, `Unreachable` or `NotReady` is expected.
    """

    async def record_events(
        self,
        *,
        sender: Sequence[Any],
        events: Sequence[Sequence[Any]],
        payloads: Mapping[int, Any] | None = None,
    ) -> Reply:
        """Take in a batch; returns after its commit."""
        ...

    async def poll(
        self, *, sender: Sequence[Any], revision: int, unreceipted: Sequence[int], wait: float
    ) -> Reply:
        """Renew the sender's lease; returns news of the plan and receipts, after `wait` at most."""
        ...

    async def drain(
        self, *, run: str | None, timeout: float, attempt_key: str | None = None
    ) -> Reply:
        """Wait until nothing of a run (None: of any) is still to be read.

        With an attempt key its processes are asked to take leave, and waited for. Returns
        `{"run", "drained", "pending", "known", "missing"}`.
        """
        ...

    async def plan(self) -> Reply:
        """Return the plan in force: `{"revision", "captures"}`."""
        ...

    async def add_capture(self, *, spec: Mapping[str, Any], by: str, wait: float = 0.0) -> Reply:
        """Order a validated capture and return it with its id, agreed on or after `wait` s."""
        ...

    async def remove_capture(self, *, capture_id: str, by: str) -> Reply:
        """Withdraw a capture and return it."""
        ...

    async def set_triggers(self, *, document: Mapping[str, Any], by: str) -> Reply:
        """Put a validated document of rules in force and return its revision."""
        ...

    async def pin(self, *, attempt_id: int, step: int, by: str) -> Reply:
        """Let what is held of a step stay.

        Returns `{"attempt_id", "step", "pinned", "payloads", "bytes", "gone", "reasons"}`.
        """
        ...

    async def unpin(self, *, attempt_id: int, step: int, by: str) -> Reply:
        """Let the payloads of a step leave the rings: `{"attempt_id", "step", "unpinned"}`."""
        ...

    async def add_engine(self, *, engine: Mapping[str, Any], by: str) -> Reply:
        """Register a long-lived engine, or register it anew, and return it."""
        ...

    async def remove_engine(self, *, name: str, by: str) -> Reply:
        """Take an engine out of the registry: `{"name"}`."""
        ...

    def read_artifact(self, *, node_id: str, path: str, offset: int, size: int) -> bytes:
        """Return a piece of a file on a node; called in a thread, see `operator_files.Nodes`."""
        ...

    async def ask_stacks(
        self,
        *,
        attempt_id: int,
        role: str | None,
        ranks: Sequence[int] | None,
        seconds: float,
        by: str,
    ) -> Reply:
        """Ask processes for their stacks: `{"request_id", "deadline_wall", "asked", "refused"}`."""
        ...

    async def status(self) -> Reply:
        """Return the coordinator's state; `not_ready` in it is the reason why it cannot serve."""
        ...
