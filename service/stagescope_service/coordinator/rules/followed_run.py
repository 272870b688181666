"""A run whose newest steps are in memory: the active rules check its next ones."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final

from stagescope_service.coordinator.rules.firings import DueFiring
from stagescope_service.rules.conditions import HISTORY
from stagescope_service.rules.document import Rules
from stagescope_service.rules.facts import StepFacts
from stagescope_service.rules.replay import StepReader
from stagescope_service.rules.series import NAMED, unpack
from stagescope_service.rules.watch import (
    REACH,
    Firing,
    FiringChanges,
    FiringRecord,
    RuleWatch,
    RunStep,
)
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.tables import FiringRow
from stagescope_wire.nonfinite import JsonObject

_ALL: Final = 1_000_000


@dataclasses.dataclass(frozen=True)
class Since:
    """The steps that were closed when the rules were set: they fire nothing.

    Identified by number, since the clocks of trainings differ from the service's.
    """

    attempt_id: int = 0
    """The highest attempt at that time."""
    closed: Mapping[int, int | None] = dataclasses.field(default_factory=dict)
    """Live attempt -> its last closed step, None if it had none."""

    @classmethod
    def now(cls, catalogue: Catalogue) -> Since:
        """Return the steps that are closed now."""
        attempts = catalogue.attempts()
        live = {
            row["attempt_id"]: row["last_closed_step"]
            for row in attempts
            if row["ended_wall"] is None
        }
        return cls(max((row["attempt_id"] for row in attempts), default=0), live)

    @classmethod
    def parse(cls, fields: JsonObject) -> Since:
        """Read the result of `wire`."""
        return cls(fields["attempt_id"], {int(key): step for key, step in fields["closed"].items()})

    def wire(self) -> JsonObject:
        """Return built-in types."""
        closed = {str(attempt_id): step for attempt_id, step in self.closed.items()}
        return {"attempt_id": self.attempt_id, "closed": closed}

    def admits(self, attempt_id: int, step: int) -> bool:
        """Return whether a step closed afterwards."""
        if attempt_id not in self.closed:
            return attempt_id > self.attempt_id
        last = self.closed[attempt_id]
        return last is None or step > last


class FollowedRun:
    """The newest steps of a run, and its firings that matter for the next.

    Args:
        catalogue, run, rules, since: what is evaluated.
        due: (attempt id, step) of the step whose turn it is.
    """

    def __init__(
        self, catalogue: Catalogue, run: str, rules: Rules, since: Since, due: tuple[int, int]
    ) -> None:
        self._since = since
        self._reader = StepReader(catalogue, run, rules)
        self.ids = {r["number"]: r["attempt_id"] for r in catalogue.attempts(run)}
        numbers = {attempt_id: number for number, attempt_id in self.ids.items()}
        known = [r for r in catalogue.firings(run=run, limit=_ALL) if r["attempt_id"] in numbers]
        self._rules = {rule.name: rule for rule in rules.rules}
        self.acted = {
            (row["rule"], RunStep(numbers[row["attempt_id"]], row["step"]))
            for row in known
            if _acted(row)
        }
        """Firings of steps that may be evaluated again whose actions were or will be taken."""
        valid = [row for row in known if row["withdrawn_wall"] is None]
        self.owed = [
            DueFiring(self._rules[row["rule"]], row)
            for row in valid
            if row["acted_wall"] is None and row["rule"] in self._rules
        ]
        """Firings whose coordinator ended before all their actions were taken."""
        fired = {
            (row["rule"], RunStep(numbers[row["attempt_id"]], row["step"])): series_state(row)
            for row in valid
        }
        self._watch = RuleWatch(rules.rules, fired=fired)

        self._ahead = self._load(due)

    def _load(self, due: tuple[int, int]) -> deque[RunStep]:
        """Read the run's newest steps; return those to evaluate, in order.

        Each waits for its turn: a stored step may still lack a payload. The steps after `due`
        were never evaluated, however many were stored while it waited. A coordinator that ended may
        also have left the last `REACH` steps before it.
        """
        places = self._reader.steps(HISTORY + REACH)
        turn = places.index(due) if due in places else 0
        begin = max(turn - REACH, 0)
        for attempt_id, step in places[:begin]:
            facts = self._reader.facts(attempt_id, step)
            if facts is not None:
                at = RunStep(facts.attempt, step)
                self._watch.remember(at, self._reader.values(facts))
        numbers = {attempt_id: number for number, attempt_id in self.ids.items()}
        ahead = places[begin:]
        return deque(sorted(RunStep(numbers[attempt_id], step) for attempt_id, step in ahead))

    def evaluate(self, attempt_id: int, step: int) -> Iterator[FiringChanges]:
        """Evaluate a step whose turn it is, after the stored steps before it; yield the changes."""
        facts = self._reader.facts(attempt_id, step)
        if facts is None:
            return
        self.ids[facts.attempt] = attempt_id
        at = RunStep(facts.attempt, step)
        while self._ahead and self._ahead[0] <= at:
            earlier = self._ahead.popleft()
            before = self._reader.facts(self.ids[earlier.attempt], earlier.step)
            if before is not None and earlier != at:
                yield self._changes_of(before)
        yield self._changes_of(facts)

    def _changes_of(self, facts: StepFacts) -> FiringChanges:
        fires = self._since.admits(facts.attempt_id, facts.step)
        at = RunStep(facts.attempt, facts.step)
        return self._watch.evaluate(at, self._reader.values(facts), fires=fires)

    def forget(self) -> None:
        """Drop the firings of steps that are never evaluated again."""
        oldest = self._watch.reach
        if oldest is not None:
            self.acted = {(rule, at) for rule, at in self.acted if at >= oldest}

    def explain(self, firing: Firing, wall: float, revision: int) -> DueFiring | None:
        """Describe a firing; None if its step is gone."""
        facts = self._reader.facts(self.ids[firing.at.attempt], firing.at.step)
        if facts is None:
            return None
        row = self._reader.explain(firing, facts, wall, revision)
        return DueFiring(self._rules[firing.rule], row)


def series_state(row: FiringRow) -> FiringRecord:
    """Return the series that a stored firing named, and whether its rule's actions followed."""
    evidence = row["evidence"]
    return FiringRecord(unpack(evidence[NAMED]), acts=evidence.get("cools_since") is None)


def _acted(row: FiringRow) -> bool:
    """Return whether the actions of a stored firing were or will be taken."""
    return series_state(row).acts or bool((row["actions"] or {}).keys() - {"cools_since"})
