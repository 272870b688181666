"""How much may be captured without a request: a budget, what was spent of it, and why no more."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from stagescope.wire.errors import InvalidPlan
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.triggers import fields


@dataclasses.dataclass(frozen=True)
class Spent:
    """What captures that triggers ordered have cost a run so far.

    Attributes:
        captures: How many were ordered.
        bytes: What their dumps take on disk.
        seconds: What the slowest rank of each step spent in them.
        run_seconds: How long the run's attempts have taken, those seconds included.
        under_way: Ids of those that have not come to an end.
    """

    captures: int = 0
    bytes: int = 0
    seconds: float = 0.0
    run_seconds: float = 0.0
    under_way: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Budget:
    """What triggers may spend on captures of a run.

    Attributes:
        captures: Most captures of the run, over all its attempts.
        bytes: Most bytes of their dumps; None for no bound.
        share: Most of the run's step time that they may take, 0 to 1; None for no bound.
    """

    captures: int
    bytes: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, value: object, field: str) -> Budget:
        """Read a budget.

        Raises:
            InvalidPlan: with the field that is wrong.
        """
        given = fields.mapping(value, field, ("captures", "bytes", "share"), "")
        share = fields.ratio(given.get("share"), f"{field}.share")
        if share is not None and share > 1.0:
            raise fields.wrong(f"{field}.share", share, "a share of the step time, up to 1")
        size = given.get("bytes")
        return cls(
            captures=fields.count(given.get("captures"), f"{field}.captures", 1, 1_000_000),
            bytes=None if size is None else fields.count(size, f"{field}.bytes", 1, 1 << 62),
            share=share,
        )

    @classmethod
    def of_settings(cls, settings: object) -> Budget | None:
        """Return the budget that a run's processes gave with `settings`, None where they did not.

        `init(settings={"capture": "auto", "capture_budget": {"captures": 2}})`; what cannot be
        read gives none.
        """
        if not isinstance(settings, Mapping) or settings.get("capture") != "auto":
            return None
        try:
            return cls.parse(settings.get("capture_budget"), "capture_budget")
        except InvalidPlan:
            return None

    def wire(self) -> dict[str, Any]:
        """Return what `parse` reads."""
        return dataclasses.asdict(self)

    def refusal(self, spent: Spent) -> str | None:
        """Return why no further capture may be ordered, or None."""
        if spent.under_way:
            return f"capture {spent.under_way[0]}, which a trigger ordered, is still under way"
        if spent.captures >= self.captures:
            return f"{spent.captures} of {self.captures} captures of the run were ordered"
        if self.bytes is not None and spent.bytes >= self.bytes:
            return f"dumps take {spent.bytes} of {self.bytes} bytes"
        if self.share is not None and spent.seconds > self.share * spent.run_seconds:
            return (
                f"captures took {spent.seconds:.1f} s of the run's {spent.run_seconds:.1f} s, "
                f"over the share of {self.share:g}"
            )
        return None

    def bytes_left(self, spent: Spent) -> int | None:
        """Return the bytes that one more capture may take, None for no bound."""
        return None if self.bytes is None else max(self.bytes - spent.bytes, 0)


def parse_permissions(value: object) -> dict[str, Budget]:
    """Read which runs may be captured without a request, and within which budget.

    Raises:
        InvalidPlan: with the field that is wrong; `capture: auto` without a budget, too.
    """
    expected = "a run's name (or pattern) -> {capture: auto, budget: {captures: n, ...}}"
    if not isinstance(value, Mapping):
        raise fields.wrong("runs", value, expected)
    found: dict[str, Budget] = {}
    for run, permission in value.items():
        name = fields.text(run, "runs, a name", 200)
        given = fields.mapping(permission, f"runs.{name}", ("capture", "budget"), "")
        if given.get("capture") == "none":
            continue
        if given.get("capture") != "auto":
            raise fields.wrong(f"runs.{name}.capture", given.get("capture"), "auto or none")
        found[name] = Budget.parse(given.get("budget"), f"runs.{name}.budget")
    return found


ORDERED_BY: Final = "trigger "
"""How `captures.by` begins where a trigger ordered it."""
_NEVER_STARTED: Final = ("refused", "given up", "too late")
_ALL: Final = 1_000_000


def spent(catalogue: Catalogue, run: str) -> Spent:
    """Return how much of its budget a run has spent."""
    ordered = [
        row
        for row in catalogue.captures(run=run)
        if (row["by"] or "").startswith(ORDERED_BY) and row["state"] not in _NEVER_STARTED
    ]
    size, seconds = 0, 0.0
    if ordered:
        by_rank: defaultdict[tuple[int, int | None], defaultdict[tuple[str, int], float]]
        by_rank = defaultdict(lambda: defaultdict(float))
        ids = [str(row["capture_id"]) for row in ordered]
        for dump in catalogue.dumps(capture_id=ids, limit=_ALL):
            size += dump["bytes"] or 0
            seconds_of = by_rank[dump["attempt_id"], dump["step"]]
            seconds_of[dump["role"], dump["rank"]] += dump["seconds"] or 0.0
        # The others of a step wait for its slowest rank.
        seconds = sum(max(ranks.values()) for ranks in by_rank.values())
    return Spent(
        captures=len(ordered),
        bytes=size,
        seconds=seconds,
        run_seconds=_run_seconds(catalogue, run),
        under_way=tuple(str(row["capture_id"]) for row in ordered if row["removed_wall"] is None),
    )


def _run_seconds(catalogue: Catalogue, run: str) -> float:
    found = 0.0
    for row in catalogue.attempts(run):
        end = row["ended_wall"] if row["ended_wall"] is not None else row["last_wall"]
        if end is not None and row["opened_wall"] is not None:
            found += max(end - row["opened_wall"], 0.0)
    return found
