"""Answers about runs: attempts, steps in lists, series, exactness."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stagescope_service.fields import Attempt, Number, Rank, Role, Row, Run, Stage, Step
from stagescope_service.store.queries.overview import RunRow
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.common import (
    ABSENT,
    BegunAgainIn,
    Complete,
    GapText,
    ListedMissing,
    Model,
    Page,
    RunHeading,
    ScopeHeading,
)
from stagescope_wire.nonfinite import Json


class Runs(Model, Page[RunRow]):
    """Runs, the one that was active last first."""


class Judgement(Row):
    """What the doctor says of a run, in short."""

    healthy: bool | None
    """Whether nothing is wrong; null: the doctor could not say, or no step is measured."""
    current: bool
    """Whether it is of the run as it is; false: the doctor looks again."""
    title: str | None
    """The first cause, as its rule names it; null: none was found."""
    sentence: str | None
    """The first cause with its place and its steps; null: none was found."""
    since_step: Step | None
    """The first step that shows it; null: it is no matter of steps."""
    where: str | None
    """Its rank, round, stage or operator; null: the whole step."""


class OpenFindings(Row):
    """The number of kinds of findings that are not over."""

    error: int
    """Number of kinds whose severity is error."""
    warning: int
    """Number of kinds whose severity is warning."""


class Sparkline(Row):
    """Two numbers in some steps of a run's newest attempt, evenly over all of its steps."""

    steps: list[int]
    """The steps, at most 32."""
    abs_diff: list[Number | None]
    """Mean \\|d\\| of each, in nats; null: it has none."""
    reward: list[Number | None]
    """The reward in each, the mean over the ranks; null: none was logged."""
    reward_name: str | None
    """The scalar that is taken for the reward; null: none is."""


class ListedOverview(RunRow):
    """A run, and what a reader chooses by."""

    findings: OpenFindings
    """The open findings, by severity."""
    judgement: Judgement | None
    """What the doctor says, as of a minute ago at most; null: it is being asked, ask again."""
    spark: Sparkline | None
    """Null: no step is closed."""


class RunsOverview(Model, Page[ListedOverview]):
    """Runs, the one that was active last first."""


class SettingRow(Row):
    """A setting in which some runs differ."""

    area: Annotated[str, Field(examples=["config", "git", "packages", "settings"])]
    """Where it was reported: an area of the fingerprint, or the run's `settings`."""
    name: Annotated[str, Field(examples=["actor.optim.lr"])]
    """The setting's name, with those of the groups around it."""
    values: list[Json]
    """Its value in each run; null: the run lacks it."""


class RunSettings(Model, Page[SettingRow]):
    """The settings in which runs differ."""

    runs: list[Run]
    """The runs, in the order of the values."""
    same: int
    """Number of settings that are the same in all of them."""


class Superseded(Row):
    """Steps that a later attempt repeats."""

    from_step: Annotated[int, Field(description="From this step of the trainer on.", examples=[5])]
    by: Annotated[int, Field(description="Number of the later attempt, from 1.", ge=1)]


class AttemptRow(Row):
    """An attempt with its fingerprint."""

    attempt: Attempt
    state: Literal["live", "silent", "ended"]
    """`silent`: it did not end, and none of its processes reports."""
    begun: float | None
    """Unix seconds: when the first of its processes started."""
    ended: float | None
    """Unix seconds; null: it has not."""
    end_reason: str | None
    """`finished`, `it was interrupted`, `an exception ended one of its processes`, or
    `its processes fell silent`; null: it has not ended."""
    attempt_key: str
    """Key that the processes of one start share."""
    resumed_from_step: Step | None
    """The trainer's step after which it continued; null: it continued none, or that is not
    known."""
    first_step: Step | None
    """The trainer's lowest step in it; null: it has none."""
    last_closed_step: Step | None
    """The trainer's highest closed step in it; null: none is closed."""
    unkeyed: bool | None
    """Whether raw calls without a key are in it."""
    processes: int
    """Number of processes that have reported."""
    last_wall: float | None
    """Unix seconds: when one of them last reported."""
    fingerprint: JsonObject | None
    """git, config, packages, drivers, environment without secrets; null: none was given."""
    superseded: list[Superseded]
    """Steps that later attempts repeat."""


class Attempts(RunHeading, Page[AttemptRow]):
    """A run's attempts, newest first."""

    note: str | None
    """Which steps between two attempts were never reported; null: there are none."""


class NumberName(Model):
    """A number that a run has over its steps."""

    name: Annotated[str, Field(examples=["rollout_corr/k3_kl"])]
    """Name, as `/series` and `/figures/overview` accept it."""
    kind: Literal["metric", "scalar"]
    """`metric`: published by the service; `scalar`: logged by the training."""
    unit: Annotated[str, Field(examples=["nat"])]
    """`nat`, `tokens`, `sequences` or `rows`; empty: a pure number, or not known."""


class NumberNames(RunHeading, Page[NumberName]):
    """The numbers of a run, published metrics first, in alphabetical order."""


class StepRow(Row):
    """A step in a list."""

    step: Step
    run: Run
    attempt: Attempt
    complete: Complete
    missing: list[ListedMissing]
    """Ranks that have not ended a stage in which they were expected."""
    gap: GapText
    begun_again: BegunAgainIn
    superseded_by: int | None
    """Number of the newest attempt that repeats this step; null: none does."""
    opened_wall: float | None
    """Unix seconds: when the first rank began it."""
    closed_wall: float | None
    """Unix seconds; null: it is open."""
    close_reason: str | None
    """`everyone went on`, `attempt ended`, `end_step` (a call) or `left behind` (too many steps
    were open); null: it is open."""
    measured: bool
    """Whether it has numbers."""
    lost: int
    """Lost data: number of rows of `/losses` about it."""
    pinned: bool
    """Whether its payloads and kept files stay."""


class Steps(ScopeHeading, Page[StepRow]):
    """A run's steps, newest first; without `attempt` the superseded ones come last."""

    note: str | None
    """Which steps between two attempts were never reported, and how many of which attempts are
    superseded; null: there are none."""


# --- one number over the steps ------------------------------------------------------------
class OneSeries(Model):
    """The values of one series, aligned to `steps`."""

    name: Annotated[str, Field(examples=["actor 3", "round 0", ""])]
    """Short name of its slice; empty for the step's own number."""
    stage: Stage = ABSENT
    role: Role = ABSENT
    rank: Rank = ABSENT
    round: int = ABSENT
    """Index of the round, from 0."""
    staleness: int = ABSENT
    """Trainer version - the tokens' own version, in policy versions."""
    values: list[Number | None]
    """The metric's values in its own unit; for a scalar the mean over ranks and parts. Null where
    the step has none."""
    low: list[Number | None] = ABSENT
    """Lowest value of a scalar over ranks and parts."""
    high: list[Number | None] = ABSENT
    """Highest value of a scalar over ranks and parts."""


class Series(ScopeHeading):
    """One number over the steps of a run, as columns with one entry a step, ascending."""

    metric: Annotated[str, Field(examples=["rollout_corr/kl"])]
    """Name of the metric or scalar, as requested."""
    kind: Literal["metric", "scalar"]
    """`metric`: a published number of the step summary; `scalar`: what ranks logged."""
    by: Literal["rank", "round", "staleness"] | None
    """Property that separates the series; null: one series of the whole step."""
    steps: list[Step]
    """The trainer's steps, ascending."""
    attempts: list[Attempt]
    """Number of the attempt of each step, from 1."""
    superseded_by: list[int | None]
    """Number of the newest attempt that began again at the step or before; null: none did."""
    begun_again: list[BegunAgainIn]
    """Ranks that repeated each step within the attempt, so that both passes count. Mostly empty."""
    complete: list[Complete]
    """Whether all expected ranks arrived in each step; `open` where it is not closed."""
    comparable: list[str | None]
    """The verdict on the step's streams; null: it has none."""
    suspects: list[list[str]]
    """The checks behind the verdict that found something."""
    nonfinite: list[int | None]
    """Tokens of the step under the mask with a NaN or infinite log-prob; null: it has no numbers.
    They are in no metric, so the verdict is on the other tokens."""
    reasons: list[str | None]
    """Why the step has no value; null: it has one."""
    series: list[OneSeries]
    """The series, each with an entry a step."""
    earlier_to: int | None
    """The step to give as `to` for the steps before; null: there are none."""
    note: str | None
    """The steps that only a superseded attempt has; null: there are none."""


# --- zero as proof ------------------------------------------------------------------------
class FirstDifference(Model):
    """The first step that differs, and the first token in it; where it was not kept no token."""

    step: Step
    attempt: Attempt
    text: str
    """Where it is, and both values with all digits."""
    sample_uid: str | None = ABSENT
    """The token's sample: group_id + sample_index; null: the payload names no samples."""
    role: Role = ABSENT
    rank: Annotated[
        int, Field(description="The rank that handed the token over, in its role, from 0.", ge=0)
    ] = ABSENT
    row: int = ABSENT
    """Index of the row in the payload, from 0."""
    round: int = ABSENT
    """Index of the round in the row, from 0."""
    position: int = ABSENT
    """Index among the row's tokens, from 0, or the value that `positions` gives."""
    token_id: int | None = ABSENT
    """The token's id in the tokenizer's vocabulary; null: no responses were handed over."""
    p: Number = ABSENT
    """The trainer's log-prob in nats."""
    q: Number = ABSENT
    """The rollout's log-prob in nats."""
    is_first: bool = ABSENT
    """Whether no token of the step before it differs; false: one that was not kept may."""


class ExactRange(Row):
    """Steps in a row of one verdict."""

    from_step: Step
    to_step: Step
    steps: int
    """Number of measured steps in the range."""
    attempt: Annotated[int, Field(description="Number of the attempt that did them.", ge=1)]
    verdict: Literal["exact", "differs", "not measured"]
    """`exact`: equal in all tokens, from two producers; `differs` in some; `not measured`: equal,
    which proves nothing (`reason`)."""
    tokens: int
    """Number of tokens on which it rests."""
    unequal: int
    """Number of tokens in which the streams differ, be it that one alone is not finite."""
    non_finite: int
    """Number of tokens beside those it rests on: a stream is not finite in them."""
    reason: str | None
    """Why it is not measured; null: it is."""


class Exact(ScopeHeading, Page[ExactRange]):
    """In which steps trainer and rollout are equal in all tokens; -0.0 equals 0.0."""

    text: str
    """All of it in one sentence."""
    first: FirstDifference | None
    """Null: no step differs."""


class WorstStep(Row):
    """The step of a run with the largest mean |d|."""

    abs_diff: Annotated[float, Field(description="Its mean |d| in nats.")]
    step: Step
    attempt: Attempt


class WorstToken(WorstStep):
    """The token of a run with the largest |d|."""

    abs_diff: Annotated[float, Field(description="|p - q| in nats.")]
    sample_uid: str | None
    """Its sample; null: the payload names no samples."""
    role: Role | None
    """Role of the rank that sent it; null: its process is not known."""
    rank: Rank | None
    """The rank that sent it, from 0; null: its process is not known."""
    row: Annotated[int | None, Field(description="Index of its row in the payload, from 0.")]
    position: Annotated[int | None, Field(description="Index among the row's tokens, from 0.")]


class Worst(RunHeading):
    """Where a run is worst, in the steps that no later attempt repeats."""

    step: WorstStep | None
    """Null: no step is measured."""
    token: WorstToken | None
    """Null: no step is measured."""
