"""Answers about triggers: the active rules, what fired, and what it may cost."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stagescope_service.fields import Attempt, Number, Rank, Role, Run, Stage, Step
from stagescope_service.store.tables.findings import FiredActions, FiringFacts
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.common import ABSENT, LiveRun, Model, Page


class ZScore(Model):
    """Distance from the mean of the last steps, in their standard deviations."""

    over: float
    """Number of standard deviations (n - 1), to either side."""
    steps: int
    """Number of last steps whose mean and deviation count."""


class When(Model):
    """The conditions of a rule; all that are given must hold."""

    above: float = Field(default=ABSENT, alias=">")
    """The value, in the metric's unit, is more than this number."""
    below: float = Field(default=ABSENT, alias="<")
    """The value, in the metric's unit, is less than this number."""
    at_least: float = Field(default=ABSENT, alias=">=")
    """The value, in the metric's unit, is at least this number."""
    at_most: float = Field(default=ABSENT, alias="<=")
    """The value, in the metric's unit, is at most this number."""
    non_finite: Literal[True] = ABSENT
    """The value is NaN or infinite."""
    median_ratio: float = ABSENT
    """The value is over this factor times the median of the run's steps before."""
    noise_ratio: float = ABSENT
    """The value is over this factor times the same metric of the noise floor."""
    standard_errors: float = ABSENT
    """The value exceeds these bounds by this factor times the standard error of its mean."""
    z_score: ZScore = ABSENT
    """How far the value is from the last steps."""


class RuleFinding(Model):
    """The finding that a rule makes."""

    severity: Literal["error", "warning", "info"]
    """The finding's severity."""
    advice: str
    """Advice of the finding; empty: none."""
    see: list[str] = ABSENT
    """Parts of the step to look at: last words of paths below `/steps/{step}`."""


class ChatWebhook(Model):
    """The webhook of a chat tool."""

    host: str
    """The host alone: the URL may hold secrets."""
    format: Literal["slack", "feishu", "dingtalk", "wecom"]
    """Format of the message."""


class RuleActions(Model):
    """The actions of a firing; absent ones are not taken."""

    finding: RuleFinding = ABSENT
    """The finding that it makes."""
    pin: int = ABSENT
    """Number of last steps whose payloads are pinned."""
    webhook: str | ChatWebhook = ABSENT
    """The host of a webhook that gets JSON (the URL may hold secrets); host and format of a chat
    tool's."""
    capture: JsonObject = ABSENT
    """The capture that is requested where the run has a budget; see `POST /captures`."""


class Rule(Model):
    """A rule on a metric."""

    name: str
    """Name of the rule, unique among the rules."""
    metric: str
    """A published name, or a pattern."""
    by: Literal["whole", "round", "rank", "stage"]
    """Whether a value is of the whole step, or of each round, rank or stage."""
    stage: Stage | None
    """Only this stage; null: the stage of the step summary, or every stage."""
    staleness: int | None
    """Only tokens of this staleness, in policy versions; null: any."""
    when: When
    """The conditions on the value."""
    for_: int = Field(alias="for")
    """Number of measured steps in a row in which the conditions must hold."""
    cooldown: int
    """Number of the run's steps after which a series that fired may fire again. The rule's pins,
    webhook and capture wait for as many."""
    actions: RuleActions
    """The actions that follow a firing."""


class Budget(Model):
    """Spending limits of triggers for captures of a run; null: no bound."""

    captures: int
    """Largest number of captures of the run, over all its attempts."""
    bytes: int | None = ABSENT
    """Most bytes of their dumps; null: no bound."""
    share: float | None = ABSENT
    """Largest share of the run's time that they may take, 0 to 1; null: no bound."""


class Permission(Model):
    """A run that triggers may capture."""

    capture: Literal["auto"]
    """Says that triggers may capture."""
    budget: Budget
    """Spending limits of the triggers."""


class _Rules(Model):
    runs: dict[str, Permission]
    """Name or pattern of a run -> what triggers may spend."""


class Firing(FiringFacts):
    """A rule that fired at a step."""

    attempt: Attempt | None
    """Number of the attempt, from 1; null: an earlier release did not store it."""
    actions: FiredActions | None
    """Null: they have not run yet."""


class Firings(Model, Page[Firing]):
    """Firings, the last first."""


class RuleStatus(Rule):
    """An active rule."""

    fired: int
    """Number of times that it fired, of the last 10 000 firings."""
    last_fired: Firing | None
    """Its last firing of those; null: there is none."""


class Spent(Model):
    """The cost of a run's captures that triggers requested."""

    captures: int
    """Number of captures that triggers requested, without those that were refused, given up or too
    late."""
    bytes: int
    """Size of their dumps in bytes."""
    seconds: float
    """Seconds that the slowest rank of each step spent in them."""
    share: float
    """Those seconds as a share of the duration of the run's attempts, 0 to 1."""


class BudgetRow(Model):
    """The budget of a run that triggers may capture."""

    run: Run
    budget: Budget
    """Spending limits of the triggers."""
    spent: Spent
    """Cost of their captures so far."""
    under_way: list[str]
    """Ids of captures that have not ended."""
    refusal: str | None
    """Why no further capture may be requested; null: there is room."""


class PinnedStep(Model):
    """A step whose payloads stay in the rings."""

    run: Run
    attempt: Attempt
    step: Step


class Triggers(_Rules):
    """The active rules."""

    revision: int
    """Number of times that rules were stored; 0: the rules that ship, before the coordinator has
    stored them."""
    wall: float | None
    """Unix seconds: since when."""
    by: str | None
    """Who set them."""
    source: Annotated[str, Field(examples=["defaults", "set", "/etc/stagescope/triggers.yaml"])]
    """`defaults`, `set` (by `PUT /triggers`), or the path of the file that they were read from."""
    rules: list[RuleStatus]
    """The rules, and when each fired last."""
    budgets: list[BudgetRow]
    """The runs that triggers may capture."""
    pinned: list[PinnedStep]
    """Steps whose payloads stay in the rings, the newest first."""
    notes: list[str]
    """Notes on names and patterns in `runs` that no known run has: they may be misspelt."""


class NewTriggers(_Rules):
    """The rules that became active."""

    revision: int
    """Number of times that rules were stored."""
    rules: list[Rule]
    """The active rules."""
    notes: list[str]
    """Notes on names and patterns in `runs` that no known run has: they may be misspelt."""


class DefaultTriggers(_Rules):
    """The rules that ship."""

    yaml: str
    """The rules as YAML, with their comments."""
    rules: list[Rule]
    """The rules as data."""


class WouldFire(Model):
    """A rule that would have fired at a stored step."""

    attempt: Attempt
    step: Step
    rule: str
    """Name of the rule."""
    value: Number
    """The value that met the conditions, in the metric's unit; the worst if there are several."""
    metric: str
    """Published name of the metric."""
    stage: Stage | None
    """The stage that it is about; null: it is about none."""
    role: Role | None
    """Role of the ranks that it concerns; null: none, or several roles."""
    rank: Rank | None
    """The rank that it concerns, from 0; null: none, or several equally bad ones."""
    round: int | None
    """Index of the round that it concerns, from 0; null: none."""
    message: str
    """The rule that would have fired, where, and the value."""
    evidence: JsonObject
    """Evidence, as of a firing."""
    fired_live: bool
    """Whether it fired in the service."""


class DryRun(Model):
    """Which stored steps would have fired."""

    run: Run
    also_live: list[LiveRun]
    """The other runs that are live."""
    steps: int
    """Number of steps that the rules were applied to."""
    rules: list[str]
    """The rules that were tried."""
    rows: list[WouldFire]
    """The firings, by attempt and step."""
