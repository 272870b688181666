"""Answers about runs: attempts, steps in lists, series, exactness, findings and losses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stagescope_service.api.encoding import JsonObject
from stagescope_service.api.models.common import (
    ABSENT,
    Attempt,
    BegunAgainIn,
    Complete,
    GapText,
    ListedMissing,
    Model,
    Number,
    Page,
    Rank,
    Role,
    Run,
    RunHeading,
    ScopeHeading,
    Stage,
    Step,
)


class RunRow(Model):
    """A run, with its newest attempt."""

    run: Run
    live: bool
    """Whether one of its attempts has a live process."""
    attempt: Attempt | None
    """The newest; null: it has none."""
    attempt_key: str | None
    attempts: int
    """How many it has."""
    last_closed_step: Step | None
    created_wall: float | None
    """Unix seconds."""
    last_wall: float | None
    """Unix seconds: when one of its processes last reported."""
    settings: JsonObject | None
    """The run's settings, as its processes reported them."""


class Runs(Model, Page[RunRow]):
    """Runs, the one that was active last first."""


class Superseded(Model):
    """Steps that a later attempt repeats."""

    from_step: Step
    """From this step on."""
    by: Attempt


class AttemptRow(Model):
    """An attempt with its fingerprint."""

    attempt: Attempt
    state: Literal["live", "silent", "ended"]
    """`silent`: it did not end, and none of its processes reports."""
    begun: float | None
    """Unix seconds."""
    ended: float | None
    """Unix seconds; null: it has not."""
    end_reason: str | None
    attempt_key: str
    """What the processes of one start have in common."""
    resumed_from_step: Step | None
    first_step: Step | None
    last_closed_step: Step | None
    unkeyed: bool | None
    """Whether raw calls without a key are in it."""
    processes: int
    """How many have reported."""
    last_wall: float | None
    """Unix seconds: when one of them last reported."""
    fingerprint: JsonObject | None
    """git, config, packages, drivers, environment without secrets; null: none was given."""
    superseded: list[Superseded]
    """Steps that later attempts repeat."""


class Attempts(RunHeading, Page[AttemptRow]):
    """A run's attempts, newest first."""


class StepRow(Model):
    """A step in a list."""

    step: Step
    run: Run
    attempt: Attempt
    complete: Complete
    missing: list[ListedMissing]
    gap: GapText
    begun_again: BegunAgainIn
    superseded_by: int | None
    """The newest attempt that repeats this step."""
    opened_wall: float | None
    """Unix seconds: when the first rank began it."""
    closed_wall: float | None
    """Unix seconds; null: it is open."""
    close_reason: str | None
    measured: bool
    """Whether it has numbers."""
    losses: int
    """How many rows of `/losses` are about it."""
    pinned: bool
    """Whether its payloads and kept files stay."""


class Steps(ScopeHeading, Page[StepRow]):
    """A run's steps, newest first."""


# --- one number over the steps ------------------------------------------------------------
class OneSeries(Model):
    """The values of one series, aligned to `steps`."""

    name: Annotated[str, Field(examples=["actor 3", "round 0", ""])]
    """What it is of, in short; empty for the step's own number."""
    stage: Stage = ABSENT
    role: Role = ABSENT
    rank: Rank = ABSENT
    round: int = ABSENT
    """From 0."""
    staleness: int = ABSENT
    """Trainer version - the tokens' own version."""
    values: list[Number | None]
    """Null where the step has none."""
    low: list[Number | None] = ABSENT
    """Of a scalar: the lowest over ranks and parts."""
    high: list[Number | None] = ABSENT
    """Of a scalar: the highest."""


class Series(ScopeHeading):
    """One number over the steps of a run, as columns with one entry a step, ascending."""

    metric: Annotated[str, Field(examples=["rollout_corr/kl"])]
    kind: Literal["metric", "scalar"]
    by: Literal["rank", "round", "staleness"] | None
    steps: list[Step]
    attempts: list[Attempt]
    superseded_by: list[int | None]
    """The newest attempt that repeats the step."""
    begun_again: list[BegunAgainIn]
    complete: list[Complete]
    comparable: list[str | None]
    """The verdict on the step's streams; null: it has none."""
    suspects: list[list[str]]
    """The checks behind the verdict that found something."""
    reasons: list[str | None]
    """Why the step has no value; null: it has one."""
    series: list[OneSeries]
    earlier_to: int | None
    """The `to` that answers the steps before; null: there are none."""


# --- zero as proof ------------------------------------------------------------------------
class FirstDifference(Model):
    """The first step that differs, and the first token in it; where it was not kept no token."""

    step: Step
    attempt: Attempt
    text: str
    """Where it is, and both values with all digits."""
    sample_uid: str | None = ABSENT
    role: Role = ABSENT
    rank: Rank = ABSENT
    """The rank that handed the token over."""
    row: int = ABSENT
    """Of the payload."""
    round: int = ABSENT
    position: int = ABSENT
    """Of the row's tokens, from 0, or as given in `positions`."""
    token_id: int | None = ABSENT
    p: Number = ABSENT
    """The trainer's log-prob, in nats."""
    q: Number = ABSENT
    """The rollout's."""
    is_first: bool = ABSENT
    """Whether no token of the step before it differs; false: one that was not kept may."""


class ExactRange(Model):
    """Steps in a row of one verdict."""

    from_step: Step
    to_step: Step
    steps: int
    """How many measured steps that is."""
    attempt: Attempt
    """Which attempt did them."""
    verdict: Literal["exact", "differs", "not measured"]
    tokens: int
    """On how many tokens it rests."""
    unequal: int
    """Tokens in which the streams differ, be it that one alone is not finite."""
    non_finite: int
    """Tokens beside those it rests on: a stream is not finite in them."""
    reason: str | None
    """Why it is not measured; null: it is."""


class Exact(ScopeHeading, Page[ExactRange]):
    """In which steps trainer and rollout agree in every bit."""

    text: str
    """All of it in one sentence."""
    first: FirstDifference | None
    """Null: no step differs."""


# --- what was noticed, and what was lost --------------------------------------------------
Severity = Annotated[str | None, Field(examples=["error", "warning", "info"])]
OnAttempt = Annotated[int | None, Field(description="The attempt; null: it is about none.", ge=1)]


class FindingRow(Model):
    """Something wrong that the service noticed."""

    finding_id: str
    run: Run | None
    attempt: OnAttempt
    step: Step | None
    stage: Stage | None
    role: Role | None
    rank: Rank | None
    kind: Annotated[str, Field(examples=["stage_stuck"])]
    severity: Severity
    message: str | None
    evidence: JsonObject | None
    """What it rests on, by its kind; non-finite numbers are `nan`, `inf`, `-inf`."""
    advice: str | None
    """What to try."""
    first_wall: float | None
    """Unix seconds: when it was seen first."""
    last_wall: float | None
    """Unix seconds: when it was seen last."""
    count: int | None
    """How often it was seen; null: once."""
    over_wall: float | None
    """Unix seconds: since when it is over; null: it persists, or it cannot end."""


class Findings(ScopeHeading, Page[FindingRow]):
    """Findings, the last seen first."""


class Extent(Model):
    """The steps and ranks of a group."""

    where: Annotated[str, Field(examples=["steps 10-25, rank 3"])]
    """As text."""
    first_step: Step | None
    last_step: Step | None
    steps: int
    """How many steps."""
    ranks: int
    """How many ranks."""


class _Grouped(Model):
    groups: int
    """How many groups there are, on all pages."""
    grouped: int
    """How many rows they are made of."""
    truncated: bool
    """Whether there were more rows than are grouped; the newest are."""


class FindingGroup(FindingRow, Extent):
    """Findings of one attempt with the same cause: the first of them, and their extent."""

    findings: int
    """How many rows of `/findings`."""


class FindingGroups(ScopeHeading, _Grouped, Page[FindingGroup]):
    """Groups of findings, the most severe first."""


class FindingOfGroup(Extent):
    """The findings of an attempt with the cause of one."""

    findings: int
    """How many rows of `/findings`."""
    first_id: str
    """The first of them."""


class Finding(FindingRow):
    """One finding."""

    group: FindingOfGroup


class LossRow(Model):
    """Something that was announced and never arrived, or was dropped."""

    loss_id: str
    run: Run | None
    attempt: OnAttempt
    role: Role | None
    rank: Rank | None
    step: Step | None
    stage: Stage | None
    kind: Annotated[str, Field(examples=["payload", "event", "stage"])]
    reason: str | None
    count: int | None
    """How many; null: one."""
    bytes: int | None
    """How much; null: unknown."""
    wall: float | None
    """Unix seconds: when the service noticed it."""


class Losses(ScopeHeading, Page[LossRow]):
    """Losses, the last first."""


class LossGroup(Extent):
    """Losses of one attempt of one kind, reason, stage and role: the first, and how many."""

    loss_id: str
    attempt: OnAttempt
    role: Role | None
    rank: Rank | None
    step: Step | None
    stage: Stage | None
    kind: str
    reason: str | None
    """Of the first; numbers in it may be others in the others."""
    wall: float | None
    """Unix seconds: when the service noticed the first of them."""
    losses: int
    """How many rows of `/losses`."""
    count: int
    """How many were lost."""
    bytes: int
    """How much, of those that are known."""
    first_wall: float | None
    """Unix seconds."""
    last_wall: float | None
    """Unix seconds."""


class LossGroups(ScopeHeading, _Grouped, Page[LossGroup]):
    """Groups of losses, the most lost first."""


class FiringGroup(Extent):
    """Firings of one rule, stage and role of an attempt: the first, and how many."""

    run: Run
    attempt: OnAttempt
    step: Step
    rule: str
    stage: Stage | None
    role: Role | None
    rank: Rank | None
    round: int | None
    message: str
    actions: JsonObject | None
    """Results of its actions, as in `/triggers/firings`; null: they have not run yet."""
    outcomes: list[str]
    """Results of the actions of all of them, as text."""
    wall: float | None
    """Unix seconds: when the first of them fired."""
    withdrawn_wall: float | None
    """Always null: withdrawn firings are left out."""
    firings: int
    """How often it fired."""
    first_wall: float | None
    """Unix seconds."""
    last_wall: float | None
    """Unix seconds."""


class FiringGroups(_Grouped, Page[FiringGroup]):
    """Groups of firings, the last first."""

    run: Run | None
    """The requested run; null: all runs."""
