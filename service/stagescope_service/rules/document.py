"""Rules as data: parsed from YAML or JSON into dataclasses, never evaluated as code."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from typing import Final, Literal, TypeAlias, cast

import yaml
from yaml.composer import ComposerError

from stagescope.wire.errors import InvalidPlan
from stagescope.wire.nonfinite import Json
from stagescope_service.rules import fields, names
from stagescope_service.rules.actions import Actions
from stagescope_service.rules.budget import Budget, parse_permissions
from stagescope_service.rules.conditions import HISTORY, When

By: TypeAlias = Literal["whole", "round", "rank", "stage"]

BY: Final = ("whole", "round", "rank", "stage")
MAX_RULES: Final = 200
MAX_BYTES: Final = 256 * 1024
DEFAULT_COOLDOWN: Final = 10
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
_RULE_FIELDS: Final = (
    "name", "metric", "by", "stage", "staleness", "when", "for", "cooldown", "actions",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule on a metric.

    Attributes:
        name: Its name in findings; unique in a document.
        metric: A published name, or a pattern: each matching name is a separate series.
        by: Whether a value is of the full step, or of each round, rank or stage.
        stage: Only this stage; None for the stage of the step summary (or every stage).
        staleness: Only tokens of this staleness (0: sampled by the trainer's own version).
        when: The conditions.
        consecutive: Number of consecutive measured steps in which they must hold (`for`).
        cooldown: Minimum number of the run's steps before a series that fired fires again, and
            before the rule's pins, webhook and capture follow again, whichever series fire.
        actions: The actions.
    """

    name: str
    metric: str
    when: When
    actions: Actions
    by: By = "whole"
    stage: str | None = None
    staleness: int | None = None
    consecutive: int = 1
    cooldown: int = DEFAULT_COOLDOWN

    @classmethod
    def parse(cls, value: object, field: str) -> Rule:
        """Parse a rule.

        Raises:
            InvalidPlan: with the field that is wrong.
        """
        given = fields.mapping(value, field, _RULE_FIELDS, "")
        name = fields.text(given.get("name"), f"{field}.name", 100)
        if not _NAME.fullmatch(name):
            raise fields.wrong(f"{field}.name", name, "letters, digits and . _ -")
        by = given.get("by", "whole")
        if by not in BY:
            raise fields.wrong(f"{field}.by", by, f"one of {', '.join(BY)}")
        metric = fields.text(given.get("metric"), f"{field}.metric", 200)
        names.check_metric(metric, by, f"{field}.metric")
        stage, age = given.get("stage"), given.get("staleness")
        if age is not None and by not in ("whole", "round"):
            raise fields.wrong(f"{field}.staleness", age, "only with by: whole or by: round")
        when = When.parse(given.get("when"), f"{field}.when")
        if when.standard_errors is not None and metric not in names.MEANS:
            expected = f"only with metric: {' or '.join(names.MEANS)}"
            raise fields.wrong(f"{field}.when.standard_errors", when.standard_errors, expected)
        of_events = metric in names.OF_STAGES or bool(names.scalar_of(metric))
        if of_events and (when.noise_ratio is not None or age is not None or by == "round"):
            expected = "a metric of both streams, for noise_ratio, staleness and by: round"
            raise fields.wrong(f"{field}.metric", metric, expected)
        return cls(
            name=name,
            metric=metric,
            by=cast(By, by),
            stage=None if stage is None else fields.text(stage, f"{field}.stage", 200),
            staleness=None if age is None else fields.count(age, f"{field}.staleness", 0, 1 << 30),
            when=when,
            consecutive=fields.count(given.get("for", 1), f"{field}.for", 1, HISTORY),
            cooldown=fields.count(
                given.get("cooldown", DEFAULT_COOLDOWN), f"{field}.cooldown", 0, 1_000_000
            ),
            actions=Actions.parse(given.get("actions", {"finding": {}}), f"{field}.actions"),
        )

    def wire(self, *, secrets: bool) -> dict[str, Json]:
        """Return the document form that `parse` reads; without `secrets` no webhook's URL."""
        return {
            "name": self.name,
            "metric": self.metric,
            "by": self.by,
            "stage": self.stage,
            "staleness": self.staleness,
            "when": self.when.wire(),
            "for": self.consecutive,
            "cooldown": self.cooldown,
            "actions": self.actions.wire(secrets=secrets),
        }

    @property
    def of_stages(self) -> bool:
        """Whether the metric comes from stage events."""
        return self.metric in names.OF_STAGES or self.of_scalars

    @property
    def of_scalars(self) -> bool:
        """Whether the metric counts non-finite scalars."""
        return bool(names.scalar_of(self.metric))

    @property
    def lists_only_bad(self) -> bool:
        """Whether it lists only the ranks that are missing or have non-finite values."""
        by_rank = self.metric == names.MISSING_RANKS or names.is_nonfinite(self.metric)
        return self.of_scalars or (self.by == "rank" and by_rank)


@dataclasses.dataclass(frozen=True)
class Rules:
    """A document of rules, and the runs that triggers may capture."""

    rules: tuple[Rule, ...]
    runs: Mapping[str, Budget] = dataclasses.field(default_factory=dict)
    """Name or pattern of a run -> its budget; other runs have none."""

    @classmethod
    def parse(cls, value: object) -> Rules:
        """Parse a document.

        Raises:
            InvalidPlan: with the field that is wrong.
        """
        given = fields.mapping(value, "triggers", ("rules", "runs"), "rules (a list) and runs")
        listed = given.get("rules")
        if not isinstance(listed, Sequence) or isinstance(listed, str):
            raise fields.wrong("rules", listed, "a list of rules")
        if len(listed) > MAX_RULES:
            raise InvalidPlan(f"{len(listed)} rules", expected=f"at most {MAX_RULES}")
        rules = tuple(Rule.parse(rule, f"rules[{at}]") for at, rule in enumerate(listed))
        seen: set[str] = set()
        for rule in rules:
            if rule.name in seen:
                raise InvalidPlan(f"two rules are called {rule.name!r}", expected="unique names")
            seen.add(rule.name)
        runs = given.get("runs")
        return cls(rules, parse_permissions({} if runs is None else runs))

    def wire(self, *, secrets: bool = True) -> dict[str, Json]:
        """Return the document form that `parse` reads; without `secrets` no webhook's URL."""
        return {
            "rules": [rule.wire(secrets=secrets) for rule in self.rules],
            "runs": {
                name: {"capture": "auto", "budget": budget.wire()}
                for name, budget in self.runs.items()
            },
        }

    def check_hosts(self, allowed: Collection[str]) -> None:
        """Refuse webhooks of hosts that are not among `allowed` (empty: any host is).

        Raises:
            InvalidPlan: with the first rule that has one.
        """
        for at, rule in enumerate(self.rules):
            if rule.actions.webhook is not None:
                rule.actions.webhook.check_host(allowed, f"rules[{at}].actions.webhook")

    def check_captures(self) -> None:
        """Refuse captures that could not be requested when their rule fires.

        Raises:
            InvalidPlan: with the first rule that has one.
        """
        for at, rule in enumerate(self.rules):
            if rule.actions.capture is not None:
                rule.actions.capture.check(f"rules[{at}].actions.capture")

    def budget_of(self, run: str, settings: object = None) -> Budget | None:
        """Return the budget of a run for captures by triggers, None if they are not allowed.

        The document's entry (by name, else by the first pattern) takes precedence over `settings`,
        which the run's processes reported.
        """
        if run in self.runs:
            return self.runs[run]
        for pattern, budget in self.runs.items():
            if fnmatch.fnmatchcase(run, pattern):
                return budget
        return Budget.of_settings(settings)


def read_yaml(text: str) -> Rules:
    """Parse a document from YAML (JSON is YAML, too).

    Raises:
        InvalidPlan: invalid YAML, or an invalid document.
    """
    return Rules.parse(load_yaml(text))


def load_yaml(text: str) -> Json:
    """Parse YAML without aliases, tags or objects.

    Raises:
        InvalidPlan: invalid or too much YAML.
    """
    if len(text) > MAX_BYTES:
        raise InvalidPlan(f"{len(text)} characters", expected=f"at most {MAX_BYTES}")
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        # Without the text around the error, which may contain a webhook's secret.
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise InvalidPlan(
            f"the rules are no YAML: {problem or type(error).__name__}{line}", expected="YAML"
        ) from None


class _Loader(yaml.SafeLoader):
    """Refuses aliases: a few lines of them can expand to gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ComposerError(None, None, "aliases are not allowed")
        return super().compose_node(parent, index)


# YAML 1.1 reads 1e-3 as a string, since it has no decimal point.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+"), list("-+0123456789")
)


def defaults_text() -> str:
    """Return the default rules as YAML with comments."""
    package = resources.files("stagescope_service.rules")
    return package.joinpath("defaults.yaml").read_text(encoding="utf-8")


def defaults() -> Rules:
    """Return the default rules."""
    return read_yaml(defaults_text())
