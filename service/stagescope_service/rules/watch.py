"""The state machine of rules over the steps of one run: which steps fire which rules.

Pure, and a function of the steps alone. The final firings do not depend on the order in which steps
are aggregated, or how often. This holds within the last `REACH` steps; a step that arrives after as
many newer ones is not evaluated.

Cooldown is by series: a firing names every series that met the conditions, and these do not fire
again for `cooldown` steps. Any other series fires at once. A rule's costly actions (`acts`) follow
at most once in as many steps, whichever series fire. A NaN that spreads from rank to rank is
reported for each rank, and requests one capture.

The predecessors of a step are those that the run continued from: attempt 2, resumed at step 5, has
steps 4, 3, ... of attempt 1 before its own 5.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np

from stagescope_service.rules.conditions import HISTORY, Bool, ConditionResult, Float64
from stagescope_service.rules.document import Rule
from stagescope_service.rules.series import SeriesKey, Values

REACH: Final = 64
"""Number of newest steps of a run for which a late or repeated aggregation counts."""
_COOLING: Final = 256
"""Maximum previous firings of a rule that are checked for cooldown."""


class RunStep(NamedTuple):
    """A step of a run, sortable in the run's order."""

    attempt: int
    step: int


@dataclasses.dataclass(frozen=True)
class Hit:
    """A series that met a rule's conditions: its value and the reference numbers."""

    series: SeriesKey
    value: float
    numbers: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Firing:
    """A firing of a rule at a step: a new one, or one that now names other series.

    Attributes:
        rule: the rule's name.
        at: the step.
        hits: the new series, the worst first.
        lasting: further series that met the conditions but are cooling down from an earlier firing.
        cools_since: the firing whose actions are in cooldown; None if the rule's actions follow.
    """

    rule: str
    at: RunStep
    hits: tuple[Hit, ...]
    lasting: tuple[Hit, ...] = ()
    cools_since: RunStep | None = None


@dataclasses.dataclass(frozen=True)
class FiringRecord:
    """The record of a firing for later steps.

    Attributes:
        series: the series that it named.
        acts: whether its actions followed.
    """

    series: frozenset[SeriesKey]
    acts: bool = True


@dataclasses.dataclass(frozen=True)
class FiringChanges:
    """The effect of a step: firings that are new or changed, and those that are withdrawn."""

    fired: list[Firing]
    withdrawn: list[tuple[str, RunStep]]


class _Step:
    """The stored state of a step."""

    def __init__(self, values: Mapping[str, Values], fires: bool) -> None:
        self.fires = fires
        self.values = dict(values)
        self.held: dict[str, ConditionResult] = {}


class RuleWatch:
    """Evaluates rules on the steps of one run.

    Args:
        rules: the active rules.
        fired: (rule, step) -> the existing firings.
    """

    def __init__(
        self,
        rules: Iterable[Rule],
        *,
        fired: Mapping[tuple[str, RunStep], FiringRecord] | None = None,
    ) -> None:
        self._rules = tuple(rules)
        self._fired: dict[str, list[RunStep]] = {rule.name: [] for rule in self._rules}
        self._records: dict[tuple[str, RunStep], FiringRecord] = {}
        for (name, at), record in sorted((fired or {}).items(), key=lambda item: item[0]):
            if name in self._fired:
                self._record(name, at, record)
        self._steps: dict[RunStep, _Step] = {}
        self._order: list[RunStep] = []

    def fired(self, rule: str) -> list[RunStep]:
        """Return the steps at which a rule fired, in order."""
        return list(self._fired.get(rule, ()))

    @property
    def reach(self) -> RunStep | None:
        """The oldest step that may be evaluated again; None: every one may."""
        return self._order[-REACH] if len(self._order) >= REACH else None

    def remember(self, at: RunStep, values: Mapping[str, Values]) -> None:
        """Add a step as history only; before any `take`."""
        bisect.insort(self._order, at)
        self._steps[at] = self._step(at, values, fires=False)

    def evaluate(
        self, at: RunStep, values: Mapping[str, Values], *, fires: bool = True
    ) -> FiringChanges:
        """Evaluate the rules on a step that was aggregated (again).

        Args:
            at: the step.
            values: the values of each rule in it.
            fires: whether it may fire; a step that closed before the rules were set is history.
        """
        changes = FiringChanges([], [])
        before = self._steps.get(at)
        if before is not None and _equal_values(before.values, values):
            return changes
        if before is None:
            if len(self._order) >= HISTORY + REACH and at < self._order[-REACH]:
                return changes
            bisect.insort(self._order, at)
        self._steps[at] = self._step(at, values, fires)
        begin = max(bisect.bisect_left(self._order, at), len(self._order) - REACH)
        for later in self._order[begin:]:
            self._evaluate(later, changes)
        for old in self._order[: -(HISTORY + REACH)]:
            del self._steps[old]
        del self._order[: -(HISTORY + REACH)]
        return changes

    def _step(self, at: RunStep, values: Mapping[str, Values], fires: bool) -> _Step:
        """Return a step to store; series equal to the previous step's are shared in memory."""
        index = bisect.bisect_left(self._order, at)
        before = self._steps[self._order[index - 1]].values if index else {}
        shared = {name: new.sharing(before.get(name)) for name, new in values.items()}
        return _Step(shared, fires)

    # --- one step -----------------------------------------------------------------------------
    def _evaluate(self, at: RunStep, changes: FiringChanges) -> None:
        step = self._steps[at]
        preceding = list(self._preceding(at))
        for rule in self._rules:
            values = step.values[rule.name]
            held = step.held[rule.name] = self._check(rule, values, preceding)
            streak = self._streak(rule, values, held, preceding)
            if not step.fires:
                continue
            named = frozenset(values.series[index] for index in np.flatnonzero(streak).tolist())
            new_series, since = self._not_cooling(rule, at, named)
            before = self._records.get((rule.name, at))
            if new_series:
                now = FiringRecord(named, acts=since is None)
                self._record(rule.name, at, now)
                if before is None or _must_report_again(before, now):
                    hits = _hits(rule, values, held, streak)
                    changes.fired.append(
                        Firing(
                            rule.name,
                            at,
                            tuple(hit for hit in hits if hit.series in new_series),
                            tuple(hit for hit in hits if hit.series not in new_series),
                            since,
                        )
                    )
            elif before is not None:
                self._fired[rule.name].remove(at)
                del self._records[rule.name, at]
                changes.withdrawn.append((rule.name, at))

    def _record(self, rule: str, at: RunStep, record: FiringRecord) -> None:
        """Record a firing; drop those that are too old to be checked."""
        fired = self._fired[rule]
        index = bisect.bisect_left(fired, at)
        if fired[index : index + 1] != [at]:
            fired.insert(index, at)
        before = self._records[rule, fired[index - 1]] if index else None
        if before is not None and before.series == record.series:
            record = dataclasses.replace(record, series=before.series)  # one set for both
        self._records[rule, at] = record
        for old in fired[: -_COOLING - REACH]:
            del self._records[rule, old]
        del fired[: -_COOLING - REACH]

    def _preceding(self, at: RunStep) -> Iterator[RunStep]:
        """Yield the preceding steps of the run, the nearest first."""
        reached, left = at.step, HISTORY
        for index in range(bisect.bisect_left(self._order, at) - 1, -1, -1):
            earlier = self._order[index]
            if earlier.step < reached:
                reached, left = earlier.step, left - 1
                yield earlier
                if not left:
                    return

    def _check(self, rule: Rule, values: Values, preceding: list[RunStep]) -> ConditionResult:
        history = np.empty((0, len(values.series)))
        if rule.when.needs_history and values.series:
            rows = [self._row(rule, earlier, values.series) for earlier in reversed(preceding)]
            history = np.array([row for row in rows if row is not None], np.float64)
            history = history.reshape(-1, len(values.series))
        return rule.when.evaluate(values.values, values.noise, history, values.errors)

    def _row(self, rule: Rule, at: RunStep, series: tuple[SeriesKey, ...]) -> Float64 | None:
        """Return the values of these series in a step, None if it has no value of the rule."""
        earlier_values = self._steps[at].values[rule.name]
        if not earlier_values.series:
            return None
        if earlier_values.series == series:
            return earlier_values.values
        by_series = dict(zip(earlier_values.series, earlier_values.values.tolist(), strict=True))
        absent = 0.0 if rule.lists_only_bad else np.nan
        return np.array([by_series.get(one, absent) for one in series], np.float64)

    def _streak(
        self, rule: Rule, values: Values, held: ConditionResult, preceding: list[RunStep]
    ) -> Bool:
        """Return for each series whether it held in `rule.consecutive` measured steps in a row."""
        streak, left = held.holds.copy(), rule.consecutive - 1
        for earlier in preceding:
            if not left or not streak.any():
                break
            earlier_values = self._steps[earlier].values[rule.name]
            if not earlier_values.series:
                continue
            holding = self._series_held_at(rule, earlier)
            streak &= np.array([one in holding for one in values.series], bool)
            left -= 1
        return streak if not left else np.zeros_like(streak)

    def _series_held_at(self, rule: Rule, at: RunStep) -> set[SeriesKey]:
        step = self._steps[at]
        if rule.name not in step.held:  # stored as history, and not evaluated before
            preceding = list(self._preceding(at))
            step.held[rule.name] = self._check(rule, step.values[rule.name], preceding)
        earlier_values, held = step.values[rule.name], step.held[rule.name]
        return {one for one, holds in zip(earlier_values.series, held.holds, strict=True) if holds}

    def _not_cooling(
        self, rule: Rule, at: RunStep, named: frozenset[SeriesKey]
    ) -> tuple[frozenset[SeriesKey], RunStep | None]:
        """Return the series that are not in cooldown, and the firing whose actions are."""
        since: RunStep | None = None
        fired = self._fired[rule.name]
        before = fired[: bisect.bisect_left(fired, at)]
        for earlier in reversed(before[-_COOLING:]):
            if not named:
                break
            if 0 < at.step - earlier.step < rule.cooldown and self._precedes(earlier, at):
                record = self._records[rule.name, earlier]
                named -= record.series
                if since is None and record.acts:
                    since = earlier
        return named, since

    def _precedes(self, earlier: RunStep, at: RunStep) -> bool:
        """Return whether a step precedes another in the run, and is not of an abandoned branch."""
        begin, end = bisect.bisect_right(self._order, earlier), bisect.bisect_left(self._order, at)
        return all(between.step > earlier.step for between in self._order[begin:end])


def _must_report_again(before: FiringRecord, now: FiringRecord) -> bool:
    """Return whether to report a firing again: its series changed, or its actions now follow."""
    return before.series != now.series or (now.acts and not before.acts)


def _equal_values(before: Mapping[str, Values], values: Mapping[str, Values]) -> bool:
    return before.keys() == values.keys() and all(
        before[name].same_as(new) for name, new in values.items()
    )


def _hits(rule: Rule, values: Values, held: ConditionResult, streak: Bool) -> tuple[Hit, ...]:
    """Return the hits, the worst first: non-finite ones, then by magnitude."""
    sign = 1.0 if rule.when.lower_is_worse else -1.0
    found = np.flatnonzero(streak).tolist()
    sizes = np.where(np.isfinite(values.values), sign * values.values, -np.inf)
    return tuple(
        Hit(
            values.series[at],
            float(values.values[at]),
            {name: float(numbers[at]) for name, numbers in held.numbers.items()},
        )
        for at in sorted(found, key=lambda at: (sizes[at], values.series[at].rank or 0, at))
    )
