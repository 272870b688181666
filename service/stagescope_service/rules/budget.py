"""Budgets of captures that triggers request: limits, spending, and reasons for refusal."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, Final

from stagescope_service.rules import fields
from stagescope_service.store.catalogue import Catalogue
from stagescope_wire.errors import InvalidPlan
from stagescope_wire.render import counted


@dataclasses.dataclass(frozen=True)
class Spent:
    """The cost so far of a run's captures that triggers requested.

    Attributes:
        captures: Number of requested captures.
        bytes: Size of their dumps on disk.
        seconds: Time that the slowest rank of each step spent in them.
        run_seconds: Duration of the run's attempts, those seconds included.
        under_way: Ids of captures that have not ended.
    """

    captures: int = 0
    bytes: int = 0
    seconds: float = 0.0
    run_seconds: float = 0.0
    under_way: tuple[str, ...] = ()


def _share(value: object, field: str) -> float:
    share = fields.ratio(value, field)
    if share > 1.0:
        raise fields.wrong(field, share, "a share of the step time, up to 1")
    return share


@dataclasses.dataclass(frozen=True)
class Budget(fields.Declared):
    """The limits of captures of a run that triggers request.

    Attributes:
        captures: Maximum captures of the run, over all its attempts.
        bytes: Maximum bytes of their dumps; None for no bound.
        share: Maximum share of the run's step time, 0 to 1; None for no bound.
    """

    SHOWS_DEFAULTS = True

    captures: Annotated[int, fields.count(1, 1_000_000)]
    bytes: Annotated[int | None, fields.count(1, 1 << 62)] = None
    share: Annotated[float | None, _share] = None

    @classmethod
    def of_settings(cls, settings: object) -> Budget | None:
        """Return the budget in the `settings` of a run's processes, None if there is none.

        `init(settings={"capture": "auto", "capture_budget": {"captures": 2}})`; an invalid budget
        counts as none.
        """
        if not isinstance(settings, Mapping) or settings.get("capture") != "auto":
            return None
        try:
            return cls.parse(settings.get("capture_budget"), "capture_budget")
        except InvalidPlan:
            return None

    def refusal(self, spent: Spent) -> str | None:
        """Return why no further capture may be requested, or None."""
        if spent.under_way:
            return f"capture {spent.under_way[0]}, which a trigger requested, is still under way"
        if spent.captures >= self.captures:
            allowed = counted(self.captures, "capture")
            were = "was" if self.captures == 1 else "were"
            return f"{spent.captures} of {allowed} of the run {were} requested"
        if self.bytes is not None and spent.bytes >= self.bytes:
            return f"dumps take {spent.bytes} of {self.bytes} bytes"
        if self.share is not None and spent.seconds > self.share * spent.run_seconds:
            return (
                f"captures took {spent.seconds:.1f} s of the run's {spent.run_seconds:.1f} s, "
                f"over the share of {self.share:g}"
            )
        return None

    def bytes_left(self, spent: Spent) -> int | None:
        """Return the maximum bytes of a further capture, None for no bound."""
        return None if self.bytes is None else max(self.bytes - spent.bytes, 0)


def parse_permissions(value: object) -> dict[str, Budget]:
    """Parse which runs triggers may capture, and within which budget.

    Raises:
        InvalidPlan: with the field that is wrong; also for `capture: auto` without a budget.
    """
    expected = "a run's name (or pattern) -> {capture: auto, budget: {captures: n, ...}}"
    if not isinstance(value, Mapping):
        raise fields.wrong("runs", value, expected)
    found: dict[str, Budget] = {}
    for run, permission in value.items():
        name = fields.text(200)(run, "runs, a name")
        given = fields.mapping(permission, f"runs.{name}", ("capture", "budget"))
        if given.get("capture") == "none":
            continue
        if given.get("capture") != "auto":
            raise fields.wrong(f"runs.{name}.capture", given.get("capture"), "auto or none")
        found[name] = Budget.parse(given.get("budget"), f"runs.{name}.budget")
    return found


ORDERED_BY: Final = "trigger "
"""Prefix of `captures.by` for captures that a trigger requested."""
_NEVER_STARTED: Final = ("refused", "given up", "too late")
_ALL: Final = 1_000_000


def spent(catalogue: Catalogue, run: str) -> Spent:
    """Return the part of its budget that a run has spent."""
    ordered = [
        row
        for row in catalogue.captures(run=run)
        if (row["by"] or "").startswith(ORDERED_BY) and row["state"] not in _NEVER_STARTED
    ]
    size, seconds = 0, 0.0
    if ordered:
        by_rank: defaultdict[tuple[int, int | None], defaultdict[tuple[str, int], float]]
        by_rank = defaultdict(lambda: defaultdict(float))
        ids = [row["capture_id"] for row in ordered]
        for dump in catalogue.dumps(capture_id=ids, limit=_ALL):
            size += dump["bytes"] or 0
            seconds_of = by_rank[dump["attempt_id"], dump["step"]]
            seconds_of[dump["role"], dump["rank"]] += dump["seconds"] or 0.0
        # The other ranks of a step wait for its slowest one.
        seconds = sum(max(ranks.values()) for ranks in by_rank.values())
    return Spent(
        captures=len(ordered),
        bytes=size,
        seconds=seconds,
        run_seconds=_run_seconds(catalogue, run),
        under_way=tuple(row["capture_id"] for row in ordered if row["removed_wall"] is None),
    )


def _run_seconds(catalogue: Catalogue, run: str) -> float:
    found = 0.0
    for row in catalogue.attempts(run):
        end = row["ended_wall"] if row["ended_wall"] is not None else row["last_wall"]
        found += max(end - row["opened_wall"], 0.0)
    return found
