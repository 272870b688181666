"""Answers about findings, lost data and firings, one by one and in groups."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stagescope_service.fields import Rank, Role, Row, Run, Stage, Step
from stagescope_service.store.tables.findings import FindingColumns, LossColumns
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.common import Link, Model, Page, ScopeHeading

OnAttempt = Annotated[int | None, Field(description="The attempt; null: it is about none.", ge=1)]


class FindingRow(FindingColumns):
    """Something wrong that the service found."""

    attempt: OnAttempt
    see: list[Link]
    """What to look at, as data."""


class Findings(ScopeHeading, Page[FindingRow]):
    """Findings, the last seen first."""


class Extent(Row):
    """The steps and ranks of a group."""

    where: Annotated[str, Field(examples=["steps 10-25, rank 3"])]
    """As text."""
    first_step: Step | None
    """The trainer's lowest step of them; null: they are about none."""
    last_step: Step | None
    """The trainer's highest step of them; null: they are about none."""
    steps: int
    """Number of different steps."""
    ranks: int
    """Number of different rank numbers; the same number in two roles counts once."""


class _Grouped(Model):
    groups: int
    """Number of groups, on all pages."""
    grouped: int
    """Number of rows in these groups."""
    truncated: bool
    """Whether there were more rows than are grouped; the newest are."""


class FindingGroup(Extent, FindingRow):
    """Findings of one attempt with the same cause: the first of them, and their extent.

    `message` is true of all: where they differ, ranks and steps are listed, other numbers are given
    as their smallest and largest.
    """

    findings: int
    """Number of rows of `/findings`."""


class FindingGroups(ScopeHeading, _Grouped, Page[FindingGroup]):
    """Groups of findings, the most severe first."""


class FindingOfGroup(Extent):
    """The findings of an attempt with the cause of one."""

    findings: int
    """Number of rows of `/findings`."""
    first_id: str
    """Id of the first of them."""


class Finding(FindingRow):
    """One finding."""

    group: FindingOfGroup
    """The findings of its attempt with the same cause."""


class LossRow(LossColumns):
    """Something that was announced and never arrived, or was dropped."""

    attempt: OnAttempt


class Losses(ScopeHeading, Page[LossRow]):
    """Lost data, the last first."""


class LossGroup(Extent):
    """Lost data of one attempt, kind, reason, stage and role: the first, and how many."""

    loss_id: str
    """Id of the first row of lost data."""
    attempt: OnAttempt
    role: Role | None
    """Role of the first; the same in all."""
    rank: Rank | None
    """Rank of the first in its role, from 0; null: unknown."""
    step: Step | None
    """The trainer's step of the first; null: it is of none, or that is not known."""
    stage: Stage | None
    """Stage of the first; the same in all."""
    kind: str
    """Kind of the lost data, as in `/losses`; the same in all."""
    reason: str | None
    """Reason of the first; the others may have other numbers in it."""
    wall: float | None
    """Unix seconds: `wall` of the first, which has the lowest step and rank."""
    losses: int
    """Number of rows of `/losses`."""
    count: int
    """Number of payloads, stages, dumps, events or scalars that were lost."""
    bytes: int
    """Size in bytes of the lost data whose size is known."""
    first_wall: float | None
    """Unix seconds: the earliest `wall` of them."""
    last_wall: float | None
    """Unix seconds: the latest `wall` of them."""


class LossGroups(ScopeHeading, _Grouped, Page[LossGroup]):
    """Groups of lost data, the most lost first."""


class FiringGroup(Extent):
    """Firings of one rule, stage and role of an attempt: the first, and how many."""

    run: Run
    attempt: OnAttempt
    step: Step
    rule: str
    """Name of the rule."""
    stage: Stage | None
    """Stage of the first; the same in all. Null: it concerns none."""
    role: Role | None
    """Role of the first; the same in all. Null: it concerns none, or several."""
    rank: Rank | None
    """Rank of the first in its role, from 0; null: it concerns none, or several."""
    round: int | None
    """Index of the round of the first, from 0; null: it is of none."""
    message: str
    """Message of the first."""
    actions: JsonObject | None
    """Results of its actions, as in `/triggers/firings`; null: they have not run yet."""
    outcomes: list[str]
    """Results of the actions of all of them, as text."""
    wall: float | None
    """Unix seconds: when the first of them fired."""
    withdrawn_wall: float | None
    """Unix seconds; always null: withdrawn firings are left out."""
    firings: int
    """Number of times that it fired."""
    first_wall: float | None
    """Unix seconds: when one of them fired first."""
    last_wall: float | None
    """Unix seconds: when one of them fired last."""


class FiringGroups(_Grouped, Page[FiringGroup]):
    """Groups of firings, the last first."""

    run: Run | None
    """The requested run; null: all runs."""
