"""Answers about triggers: the rules in force, what fired, and what it may cost."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stagescope_service.api.encoding import JsonObject
from stagescope_service.api.models.common import (
    ABSENT,
    Attempt,
    LiveRun,
    Model,
    Number,
    Page,
    Rank,
    Role,
    Run,
    Stage,
    Step,
)


class ZScore(Model):
    """Further from the mean of the last steps than so many of their standard deviations."""

    over: float
    steps: int


class When(Model):
    """The conditions of a rule; all that are given must hold."""

    above: float = Field(default=ABSENT, alias=">")
    below: float = Field(default=ABSENT, alias="<")
    at_least: float = Field(default=ABSENT, alias=">=")
    at_most: float = Field(default=ABSENT, alias="<=")
    non_finite: Literal[True] = ABSENT
    """The value is NaN or infinite."""
    median_ratio: float = ABSENT
    """Over so many times the median of the run's steps before."""
    noise_ratio: float = ABSENT
    """Over so many times the same metric of the noise floor."""
    z_score: ZScore = ABSENT


class RuleFinding(Model):
    """The finding that a rule makes."""

    severity: Literal["error", "warning", "info"]
    advice: str


class RuleActions(Model):
    """The actions of a firing; absent ones are not taken."""

    finding: RuleFinding = ABSENT
    pin: int = ABSENT
    """Of how many last steps the payloads are pinned."""
    webhook: str = ABSENT
    """The host alone: the URL may hold secrets."""
    capture: JsonObject = ABSENT
    """The capture that is requested where the run has a budget; see `POST /captures`."""


class Rule(Model):
    """A rule on a metric."""

    name: str
    metric: str
    """A published name, or a pattern."""
    by: Literal["whole", "round", "rank", "stage"]
    stage: Stage | None
    staleness: int | None
    """Only tokens of this staleness."""
    when: When
    for_: int = Field(alias="for")
    """In how many measured steps in a row the conditions must hold."""
    cooldown: int
    """A series that a firing named fires again after so many steps at the earliest; so do the
    rule's pins, webhook and capture."""
    actions: RuleActions


class Budget(Model):
    """What triggers may spend on captures of a run; null: no bound."""

    captures: int
    bytes: int | None = ABSENT
    share: float | None = ABSENT
    """Of the run's step time, 0 to 1."""


class Permission(Model):
    """A run that triggers may capture."""

    capture: Literal["auto"]
    budget: Budget


class _Rules(Model):
    runs: dict[str, Permission]
    """Run or pattern -> what triggers may spend."""


class PinnedOf(Model):
    """The result of pinning one step."""

    step: Step
    payloads: int
    bytes: int
    gone: int
    """Payloads that had left the rings before."""
    reasons: list[str]


class FiredPins(Model):
    """The results of pins."""

    steps: list[PinnedOf]


class FiredCapture(Model):
    """The result of a capture; both fields are absent where it does not apply."""

    capture_id: str = ABSENT
    refused: str = ABSENT
    """Why it was not requested."""


class FiredWebhook(Model):
    """The result of a webhook."""

    host: str
    delivered: bool
    reason: str | None
    """Why not."""


class FiredActions(Model):
    """The results of a firing's actions; those that its rule does not have are absent."""

    pin: FiredPins = ABSENT
    capture: FiredCapture = ABSENT
    webhook: FiredWebhook = ABSENT
    cools_since: Step = ABSENT
    """No action was taken: the rule cools down since its firing at this step."""


class Firing(Model):
    """A rule that fired at a step."""

    run: Run
    attempt: Attempt | None
    step: Step
    rule: str
    stage: Stage | None
    role: Role | None
    rank: Rank | None
    round: int | None
    message: str
    wall: float | None
    """Unix seconds."""
    revision: int | None
    """Of the rules."""
    actions: FiredActions | None
    """Null: they have not run yet."""
    withdrawn_wall: float | None
    """Unix seconds: since when it is withdrawn."""
    evidence: JsonObject
    """The numbers, what they were held against, the token, the ranks concerned."""


class Firings(Model, Page[Firing]):
    """Firings, the last first."""


class RuleStatus(Rule):
    """A rule in force."""

    fired: int
    """How often it fired, of the last 10 000 firings."""
    last_fired: Firing | None


class Spent(Model):
    """The cost of a run's captures that triggers requested."""

    captures: int
    bytes: int
    """Of their dumps."""
    seconds: float
    """What the slowest rank of each step spent in them."""
    share: float
    """Of the run's time."""


class BudgetRow(Model):
    """The budget of a run that triggers may capture."""

    run: Run
    budget: Budget
    spent: Spent
    under_way: list[str]
    """Ids of captures that have not ended."""
    refusal: str | None
    """Why no more; null: there is room."""


class PinnedStep(Model):
    """A step whose payloads stay in the rings."""

    run: Run
    attempt: Attempt
    step: Step


class Triggers(_Rules):
    """The rules in force."""

    revision: int
    """0: the rules that ship, before the coordinator has stored them."""
    wall: float | None
    """Unix seconds: since when."""
    by: str | None
    """Who set them."""
    source: Annotated[str, Field(examples=["defaults", "set", "file"])]
    rules: list[RuleStatus]
    budgets: list[BudgetRow]
    pinned: list[PinnedStep]


class NewTriggers(_Rules):
    """The rules that were put in force."""

    revision: int
    rules: list[Rule]


class DefaultTriggers(_Rules):
    """The rules that ship."""

    yaml: str
    """With their comments."""
    rules: list[Rule]


class WouldFire(Model):
    """A rule that would have fired at a stored step."""

    attempt: Attempt
    step: Step
    rule: str
    value: Number
    metric: str
    stage: Stage | None
    role: Role | None
    rank: Rank | None
    round: int | None
    message: str
    evidence: JsonObject
    """As of a firing."""
    fired_live: bool
    """Whether it did."""


class DryRun(Model):
    """Which stored steps would have fired."""

    run: Run
    also_live: list[LiveRun]
    steps: int
    """How many were looked at."""
    rules: list[str]
    """The rules that were tried."""
    rows: list[WouldFire]
