"""Rules as data: parsed from YAML or JSON into dataclasses, never evaluated as code."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import resources
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

from stagescope_service.rules import fields, names
from stagescope_service.rules.actions import Actions, FindingTemplate
from stagescope_service.rules.budget import Budget, parse_permissions
from stagescope_service.rules.conditions import HISTORY, When
from stagescope_wire.errors import InvalidPlan
from stagescope_wire.nonfinite import Json

By: TypeAlias = Literal["whole", "round", "rank", "stage"]

MAX_RULES: Final = 200
DEFAULT_COOLDOWN: Final = 10
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")


def _name(value: object, field: str) -> object:
    name = fields.text(100)(value, field)
    if not _NAME.fullmatch(str(name)):
        raise fields.wrong(field, name, "letters, digits and . _ -")
    return name


_FINDING_ALONE: Final = Actions(finding=FindingTemplate())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule(fields.Declared):
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

    SHOWS_DEFAULTS = True

    name: Annotated[str, _name]
    metric: Annotated[str, fields.text(200)]
    by: Annotated[By, fields.one_of(*get_args(By))] = "whole"
    stage: Annotated[str | None, fields.text(200)] = None
    staleness: Annotated[int | None, fields.count(0, 1 << 30)] = None
    when: Annotated[When, When.parse]
    consecutive: Annotated[int, fields.count(1, HISTORY), "for"] = 1
    cooldown: Annotated[int, fields.count(0, 1_000_000)] = DEFAULT_COOLDOWN
    actions: Annotated[Actions, Actions.parse] = _FINDING_ALONE

    @classmethod
    def parse(cls, value: object, field: str) -> Rule:
        """Read a rule."""
        made = super().parse(value, field)
        metric, age, when = made.metric, made.staleness, made.when
        names.check_metric(metric, made.by, f"{field}.metric")
        if age is not None and made.by not in ("whole", "round"):
            raise fields.wrong(f"{field}.staleness", age, "only with by: whole or by: round")
        if when.standard_errors is not None and metric not in names.MEANS:
            expected = f"only with metric: {' or '.join(names.MEANS)}"
            raise fields.wrong(f"{field}.when.standard_errors", when.standard_errors, expected)
        is_measured = when.noise_ratio is not None or age is not None or made.by == "round"
        if made.of_stages and is_measured:
            expected = "a metric of both streams, for noise_ratio, staleness and by: round"
            raise fields.wrong(f"{field}.metric", metric, expected)
        return made

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
        for field, webhook in self._actions("webhook"):
            webhook.check_host(allowed, field)

    def check_captures(self) -> None:
        """Refuse captures that could not be requested when their rule fires.

        Raises:
            InvalidPlan: with the first rule that has one.
        """
        for field, capture in self._actions("capture"):
            capture.check(field)

    def _actions(self, name: str) -> Iterator[tuple[str, Any]]:
        found = (getattr(rule.actions, name) for rule in self.rules)
        return ((f"rules[{at}].actions.{name}", each) for at, each in enumerate(found) if each)

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
    return Rules.parse(fields.load_yaml(text))


def defaults_text() -> str:
    """Return the default rules as YAML with comments."""
    package = resources.files("stagescope_service.rules")
    return package.joinpath("defaults.yaml").read_text(encoding="utf-8")


def defaults() -> Rules:
    """Return the default rules."""
    return read_yaml(defaults_text())
