"""The rulebook as data: rules read from YAML, and compared with a run's history.

A rule names a function of `evidence` with its parameters, and says what a symptom means. It also
says what to do next, what to record if evidence is lacking, and where the field met it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Annotated, Any, Final, NamedTuple

from stagescope_service.rules import fields
from stagescope_service.rules.evidence import EarlierSymptom, Evidence, not_measured
from stagescope_service.rules.history import RunHistory
from stagescope_service.rules.symptoms import mismatch, reports, streams, trends, turns, updates
from stagescope_wire.errors import InvalidPlan, StagescopeError

FAMILIES: Final = ("service", "precision", "mismatch", "reward", "time", "settings")
"""Subjects of the rules, in the order in which you must be able to trust them."""
EVIDENCE: Final[Mapping[str, Callable[..., Evidence]]] = {
    function.__name__: function
    for function in (
        trends.jump, trends.step_change, trends.growth, trends.scalar_above,
        trends.scalar_falls, trends.scalar_flat, trends.scalar_spike,
        mismatch.rank_apart, mismatch.rounds_rise, mismatch.noise_floor, mismatch.engine_apart,
        mismatch.hidden_tails, mismatch.stale, mismatch.versions_ahead,
        streams.suspect, streams.sampling, streams.rounded, streams.edge_token, streams.lattice,
        turns.retokenised, turns.turn_stops, updates.current_differs,
        reports.groups, reports.truncated, reports.finding, reports.hangs, reports.lost,
        reports.scalars_not_finite, reports.failed, reports.partial, reports.unreported,
        reports.straggler, reports.settings, reports.stream_changes,
    )
}  # fmt: skip
"""Name in a rule -> the function."""
_OF_THE_NEWEST: Final = frozenset(
    {
        "rank_apart", "rounds_rise", "rounded", "edge_token", "engine_apart", "lattice", "stale",
        "noise_floor", "straggler", "current_differs", "versions_ahead",
    }
)  # fmt: skip
"""Functions that look only at the newest steps; the others find the first step themselves."""
_OF_ONE: Final = frozenset({"rank_apart", "engine_apart", "straggler"})
"""Functions that name one rank or engine; a search for the first step stops at another one."""
_ORDER: Final = {"found": 0, "not measured": 1, "not found": 2}
_EVENTS: Final = frozenset({"jump", "step_change"})
"""Functions of an event in one step: its cause begins in that step, too."""
_AT_ONCE: Final = 2
"""Maximum steps between the begins of a symptom and its explanation, in either direction."""


class Condition(NamedTuple):
    """A function of `EVIDENCE`, and its keyword arguments as the YAML has them."""

    function: str
    parameters: Mapping[str, Any]

    @classmethod
    def parse(cls, value: object, field: str) -> Condition:
        """Read `{function: name, parameter: value, ...}`.

        Raises:
            InvalidPlan: there is no such function, or a parameter is unknown or missing.
        """
        parameters = dict(value) if isinstance(value, Mapping) else {}
        function = fields.one_of(*sorted(EVIDENCE))(parameters.pop("function", None), field)
        try:
            inspect.signature(EVIDENCE[function]).bind(None, **parameters)
        except TypeError as error:
            raise InvalidPlan(f"{field}: {function}: {error}", expected="its parameters") from None
        return cls(function, parameters)

    def evaluate(self, history: RunHistory) -> Evidence:
        """Return the evidence in a history."""
        return EVIDENCE[self.function](history, **self.parameters)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SymptomRule(fields.Declared):
    """A symptom.

    Attributes:
        name: the name of its file.
        title: the symptom, as a sentence without a full stop.
        family: one of `FAMILIES`.
        evidence: how it is found.
        meaning: what the symptom means.
        next: what to do, the first thing first; commands begin with `stagescope`.
        sources: where the field met it; empty: only this service knows it.
        figure: the path of a figure, with {run}, {attempt} and {step}; None: there is none.
        record: what to record where it is not measured; None: nothing can be done.
        explained_by: names of rules. If one of them is found, too, this one follows from it.
        findings: kinds of findings that say the same as its evidence, which does not read them.
    """

    name: Annotated[str, fields.text()]
    title: Annotated[str, fields.text()]
    family: Annotated[str, fields.one_of(*FAMILIES)]
    evidence: Annotated[Condition, Condition.parse]
    meaning: Annotated[str, fields.text()]
    next: Annotated[tuple[str, ...], fields.texts]
    sources: Annotated[tuple[str, ...], fields.texts] = ()
    figure: Annotated[str | None, fields.text()] = None
    record: Annotated[str | None, fields.text()] = None
    explained_by: Annotated[tuple[str, ...], fields.texts] = ()
    findings: Annotated[tuple[str, ...], fields.texts] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of findings that the rule looks at, patterns with `*`."""
        of_causes = (f"streams_{cause}" for cause in self.causes)
        return (*self.evidence.parameters.get("kinds", ()), *of_causes, *self.findings)

    @property
    def causes(self) -> tuple[str, ...]:
        """The causes of a step's comparability that the rule answers for."""
        return tuple(self.evidence.parameters.get("checks", ()))


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """A rule and what was found for and against it.

    Attributes:
        rule: the rule.
        evidence: what was found.
        explained_by: the found rules that explain this one.
    """

    rule: SymptomRule
    evidence: Evidence
    explained_by: tuple[SymptomRule, ...] = ()


def read_symptom(name: str, text: str) -> SymptomRule:
    """Parse the content of a symptom's file.

    Raises:
        InvalidPlan: names the file and the field that is wrong.
    """
    document = fields.load_yaml(text)
    return SymptomRule.parse(document | {"name": name}, f"rule {name}")


@cache
def rulebook() -> tuple[SymptomRule, ...]:
    """Return the rules that ship, by family and name.

    Raises:
        InvalidPlan: a rule is wrong.
    """
    directory = resources.files("stagescope_service.rules").joinpath("symptoms")
    files = [file for file in directory.iterdir() if file.name.endswith(".yaml")]
    rules = [
        read_symptom(file.name.removesuffix(".yaml"), file.read_text(encoding="utf-8"))
        for file in files
    ]
    return tuple(sorted(rules, key=lambda rule: (FAMILIES.index(rule.family), rule.name)))


def diagnose(history: RunHistory, rules: Sequence[SymptomRule] | None = None) -> list[Diagnosis]:
    """Compare rules with a history; found symptoms come first, the surest first.

    Explained symptoms follow unexplained ones, and ended ones follow those that last. If the
    evidence of a rule cannot be computed, the rule is 'not measured', with the error: one damaged
    step must not hide what the others say.
    """
    found = [
        Diagnosis(rule, _evidence(rule, history))
        for rule in (rulebook() if rules is None else rules)
    ]
    return sorted(
        (_explained(each, found) for each in found),
        key=lambda each: (
            _ORDER[each.evidence.verdict],
            each.evidence.last_step is not None,
            bool(each.explained_by),
            FAMILIES.index(each.rule.family),
            -each.evidence.sure,
            each.rule.name,
        ),
    )


def _explained(symptom: Diagnosis, found: Sequence[Diagnosis]) -> Diagnosis:
    """Return a found symptom with the other found ones that explain it."""
    if symptom.evidence.verdict != "found":
        return symptom
    causes = [each for each in found if _explains(each, symptom)]
    texts = (f"explained by {each.rule.name}: {each.rule.title}" for each in causes)
    against = (*texts, *symptom.evidence.against)
    evidence = dataclasses.replace(symptom.evidence, against=against)
    return Diagnosis(symptom.rule, evidence, tuple(each.rule for each in causes))


def _explains(cause: Diagnosis, symptom: Diagnosis) -> bool:
    """Return whether a cause explains a symptom: the rule or the same step's checks name it. The
    cause must begin no later and last as long."""
    rule, evidence = symptom.rule, symptom.evidence
    is_declared = cause.rule.name in rule.explained_by or evidence.likelier in cause.rule.causes
    if cause.evidence.verdict != "found" or not is_declared:
        return False
    if cause.evidence.last_step is not None and evidence.last_step is None:
        return False
    if cause.evidence.since_step is None or evidence.since_step is None:
        return True
    later = cause.evidence.since_step - evidence.since_step
    return later <= _AT_ONCE and (rule.evidence.function not in _EVENTS or later >= -_AT_ONCE)


def unexplained(found: Sequence[Diagnosis], history: RunHistory) -> dict[str, int]:
    """Return kind -> the number of open warnings and errors that no rule could judge.

    A rule that is not measured judges nothing.
    """
    kinds = [
        kind
        for each in found
        if each.evidence.verdict != "not measured"
        for kind in each.rule.kinds
    ]
    left = Counter(
        row["kind"]
        for row in history.findings
        if row["severity"] in _GRAVE and row["over_wall"] is None
    )
    return {
        name: count
        for name, count in left.most_common()
        if not any(fnmatch.fnmatchcase(name, kind) for kind in kinds)
    }


_GRAVE: Final = ("warning", "error")


def add_earlier(
    found: Sequence[Diagnosis],
    history: RunHistory,
    earlier: RunHistory,
    attempt: int,
    last: int | None = None,
) -> list[Diagnosis]:
    """Add the symptoms that an earlier attempt ended with.

    Args:
        found: diagnoses of `history`. A diagnosis stays as it is if it already names an attempt, or
            its symptom began in this attempt or earlier.
        history: of the run.
        earlier: of the attempt alone.
        attempt: its number.
        last: the last step that is looked at; None: the newest.
    """
    asked = [each.rule for each in found if _is_asked(each.evidence, history, attempt)]
    shown = {
        each.rule.name: _before(attempt, each.evidence, last)
        for each in diagnose(earlier, asked)
        if each.evidence.verdict == "found"
    }
    return [
        dataclasses.replace(each, evidence=each.evidence.with_before(shown[each.rule.name]))
        if each.rule.name in shown
        else each
        for each in found
    ]


def _is_asked(evidence: Evidence, history: RunHistory, attempt: int) -> bool:
    if evidence.before is not None:
        return False
    if evidence.verdict != "found":
        return True
    begun_in = None if evidence.since_step is None else history.attempt_of(evidence.since_step)
    return begun_in is not None and begun_in > attempt


def _before(attempt: int, shown: Evidence, last: int | None) -> EarlierSymptom:
    until = last if shown.last_step is None else shown.last_step
    had = "ended with it" if until is None else f"had it up to step {until}"
    since = "" if shown.since_step is None else f", since step {shown.since_step}"
    first = f": {shown.supports[0]}" if shown.supports else ""
    text = f"attempt {attempt} {had}{since}{first}"
    return EarlierSymptom(attempt, shown.since_step, text, is_end=until is None)


def _evidence(rule: SymptomRule, history: RunHistory) -> Evidence:
    try:
        found = rule.evidence.evaluate(history)
        since = None if found.verdict != "found" else _since_step(rule, history, found)
    except (StagescopeError, ArithmeticError) as error:
        return not_measured(f"it cannot be computed: {error}")
    return found if since is None else dataclasses.replace(found, since_step=since)


def _since_step(rule: SymptomRule, history: RunHistory, found: Evidence) -> int | None:
    """Return the first step that shows a symptom without a break until now.

    Rules look only at the newest steps. While a rule finds its symptom in the history up to an
    earlier step, the search goes back twice as far each time. It then narrows down between the last
    two.
    """
    if found.since_step is None or rule.evidence.function not in _OF_THE_NEWEST:
        return None
    steps = [each.step for each in history.steps]
    since, found_at, stride = found.since_step, len(steps) - 1, 1
    missing = -1
    while found_at - missing > 1:
        at = max(found_at - stride, missing + 1, 0)
        evidence = rule.evidence.evaluate(history.until(steps[at]))
        is_same = rule.evidence.function not in _OF_ONE or evidence.where == found.where
        if is_same and evidence.verdict == "found" and evidence.since_step is not None:
            since, found_at, stride = min(since, evidence.since_step), at, 2 * stride
        else:
            missing, stride = at, max((found_at - at) // 2, 1)
    return since
