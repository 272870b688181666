"""The doctor: the rules that ship, compared with a run's history."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Final

from stagescope_service.rules.causes import Diagnosis
from stagescope_service.rules.evidence import EarlierSymptom, Evidence, not_measured
from stagescope_service.rules.hidden import reveal
from stagescope_service.rules.history import RunHistory
from stagescope_service.rules.symptom import FAMILIES, SymptomRule, read_symptom
from stagescope_service.rules.symptoms import trends
from stagescope_wire.errors import StagescopeError

_OF_THE_NEWEST: Final = frozenset(
    {
        "rank_apart", "rounds_rise", "round_apart", "rounded", "edge_token", "engine_apart",
        "lattice", "stale", "noise_floor", "straggler", "current_differs", "versions_ahead",
        "suspect", "sampling",
    }
)  # fmt: skip
"""Functions that look only at the newest steps; the others find the first step themselves."""
_OF_EVERY_STEP: Final = frozenset({"suspect", "sampling"})
"""Those of them whose first step is stored with each step, unless the steps have few tokens."""
_OF_ONE: Final = frozenset({"rank_apart", "round_apart", "engine_apart", "straggler"})
"""Functions that name one rank, round or engine; a search for the first step stops at another."""
_OF_THE_MISMATCH: Final = frozenset(
    {"rank_apart", "rounds_rise", "round_apart", "edge_token", "engine_apart", "stale"}
)
"""Functions that are also evaluated where an earlier rise of the mismatch ended."""


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
    """Compare rules with a history; causes come first, see `link` and `reveal`.

    If the evidence of a rule cannot be computed, the rule is 'not measured', with the error: one
    damaged step must not hide what the others say.
    """
    found = [
        Diagnosis(rule, _evidence(rule, history))
        for rule in (rulebook() if rules is None else rules)
    ]
    return reveal(found, history, _evidence)


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
            if its symptom lasts and began in this attempt or earlier.
        history: of the run.
        earlier: of the attempt alone.
        attempt: its number.
        last: the last step that is looked at; None: the newest.
    """
    asked = [each.rule for each in found if _is_asked(each.evidence, history, attempt)]
    shown = {
        each.rule.name: _before(attempt, each, last)
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
    if evidence.verdict != "found" or evidence.last_step is not None:
        return True
    begun_in = None if evidence.since_step is None else history.attempt_of(evidence.since_step)
    return begun_in is not None and begun_in > attempt


def _before(attempt: int, symptom: Diagnosis, last: int | None) -> EarlierSymptom:
    shown = symptom.evidence
    until = last if shown.last_step is None else shown.last_step
    had = "ended with it" if until is None else f"had it up to step {until}"
    since = "" if shown.since_step is None else f", since step {shown.since_step}"
    first = f": {shown.supports[0]}" if shown.supports else ""
    text = f"attempt {attempt} {had}{since}{first}"
    return EarlierSymptom(attempt, shown.since_step, text, until is None, symptom.is_cause)


def _evidence(rule: SymptomRule, history: RunHistory) -> Evidence:
    try:
        found = rule.evidence.evaluate(history)
        if found.verdict == "not measured" and not history.steps:
            return dataclasses.replace(found, waits=True)  # nobody knows yet what is recorded
        if found.verdict == "not found":
            return _ended(rule, history) or found
        since = None if found.verdict != "found" else _since_step(rule, history, found)
    except (StagescopeError, ArithmeticError) as error:
        return not_measured(f"it cannot be computed: {error}")
    return found if since is None else dataclasses.replace(found, since_step=since)


def _ended(rule: SymptomRule, history: RunHistory) -> Evidence | None:
    """Return a symptom that an earlier rise of the mismatch showed until it ended."""
    if rule.evidence.function not in _OF_THE_MISMATCH or not history.reads_every_step:
        return None
    for rise in trends.raised(history):
        until = history.until(rise.last)
        found = rule.evidence.evaluate(until)
        if found.verdict == "found" and found.last_step is None:
            since = _since_step(rule, until, found)
            found = found if since is None else dataclasses.replace(found, since_step=since)
            return found.ended_after([each.step for each in history.steps], rise.last)
    return None


def _since_step(rule: SymptomRule, history: RunHistory, found: Evidence) -> int | None:
    """Return the first step that shows a symptom without a break until now.

    Rules look only at the newest steps. While a rule finds its symptom in the history up to an
    earlier step, the search goes back twice as far each time. It then narrows down between the last
    two.
    """
    if found.since_step is None or rule.evidence.function not in _OF_THE_NEWEST:
        return None
    is_pooled = history.pooled is not None and history.pooled.is_needed
    if rule.evidence.function in _OF_EVERY_STEP and not is_pooled and history.reads_every_step:
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
