"""The plan that is in force: the captures with a revision, without any I/O."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stagescope.captures import CAPTURE_FIELDS, matches, validate_capture
from stagescope.errors import Conflict, NotFound

__all__ = ["Plan", "matches", "validate_capture"]


class Plan:
    """The captures in force, with a revision that grows at every change."""

    def __init__(self, captures: Iterable[Mapping[str, Any]] = (), *, revision: int = 0) -> None:
        self.captures = {str(item["capture_id"]): dict(item) for item in captures}
        self.revision = revision

    def add(
        self,
        capture: Mapping[str, Any],
        *,
        by: str,
        now: float,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex[:12],
    ) -> dict[str, Any]:
        """Put a validated capture in force and return it with its id.

        Raises:
            Conflict: the same order already is in force (asked twice is ordered once).
        """
        for known in self.captures.values():
            if all(known.get(name) == capture.get(name) for name in CAPTURE_FIELDS):
                raise Conflict(
                    f"capture {known['capture_id']} already orders exactly this",
                    advice="remove it first to order it again",
                )
        entry = {
            **capture,
            "capture_id": new_id(),
            "source": "http",
            "by": by,
            "created": now,
        }
        self.captures[entry["capture_id"]] = entry
        self.revision += 1
        return entry

    def remove(self, capture_id: str) -> dict[str, Any]:
        """Withdraw a capture.

        Raises:
            NotFound: no such capture is in force.
        """
        if capture_id not in self.captures:
            raise NotFound(
                f"no capture {capture_id!r:.100} is in force",
                expected=f"one of {sorted(self.captures)}",
            )
        self.revision += 1
        return self.captures.pop(capture_id)

    def for_run(self, run: str) -> list[dict[str, Any]]:
        """Return the captures that concern `run`."""
        return [item for item in self.captures.values() if item["run"] in (None, run)]

    def wire(self, run: str | None = None) -> dict[str, Any]:
        """Return the plan as it travels to ranks and in answers."""
        captures = list(self.captures.values()) if run is None else self.for_run(run)
        return {"revision": self.revision, "captures": captures}

    def keeps(self, *, run: str, stage: str, role: str, rank: int, step: int | None) -> list[str]:
        """Return the names of the tensors that the plan keeps of this payload, without repeats."""
        names: dict[str, None] = {}
        for capture in self.for_run(run):
            if capture["keep"] and matches(capture, stage=stage, role=role, rank=rank, step=step):
                names.update(dict.fromkeys(capture["keep"]))
        return list(names)
