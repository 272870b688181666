"""Dry run of rules: the firings that they would have had on the steps of a stored run."""

from __future__ import annotations

from typing import Final

from stagescope_service.rules.document import Rules
from stagescope_service.rules.explain import explain
from stagescope_service.rules.facts import StepFacts
from stagescope_service.rules.series import Publisher, Values
from stagescope_service.rules.watch import Firing, RuleWatch, RunStep
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.queries.overview import ListedAttempt
from stagescope_service.store.tables.findings import FiringColumns

OPEN_STEPS: Final = 64
"""Maximum open steps of an attempt that may precede the closed ones in the list."""


class StepReader:
    """Reads the steps of one run, and the rules' values in them, from the catalogue."""

    def __init__(self, catalogue: Catalogue, run: str, rules: Rules) -> None:
        self._catalogue = catalogue
        self._run = run
        self._rules = {rule.name: rule for rule in rules.rules}
        self._attempts: dict[int, ListedAttempt] = {}

    def steps(self, most: int) -> list[tuple[int, int]]:
        """Return (attempt id, step) of the newest closed steps of the run, in the run's order."""
        found: list[tuple[int, int]] = []
        for attempt in self._catalogue.attempts(self._run):  # the newest first
            left = most - len(found)
            if left <= 0:
                break
            attempt_id = attempt["attempt_id"]
            rows = self._catalogue.steps(attempt_id, limit=left + OPEN_STEPS)
            closed = [row["step"] for row in rows if row["closed_wall"] is not None]
            found += [(attempt_id, step) for step in closed[:left]]
        return found[::-1]

    def facts(self, attempt_id: int, step: int) -> StepFacts | None:
        """Return the facts of a step; None if it is not closed, or belongs to another run."""
        if attempt_id not in self._attempts:
            row = self._catalogue.attempt(attempt_id)
            if row is None or row["run"] != self._run:
                return None
            self._attempts[attempt_id] = row
        number = self._attempts[attempt_id]["number"]
        found = StepFacts(self._catalogue, self._run, attempt_id, number, step)
        return found if found.is_closed else None

    def values(self, facts: StepFacts) -> dict[str, Values]:
        """Return the values of each rule in a step."""
        publisher = Publisher(facts)
        return {name: publisher.values(rule) for name, rule in self._rules.items()}

    def explain(
        self, firing: Firing, facts: StepFacts, wall: float = 0.0, revision: int | None = None
    ) -> FiringColumns:
        """Describe a firing; see `explain.explain`."""
        processes = self._catalogue.processes(facts.attempt_id)
        rule = self._rules[firing.rule]
        return explain(rule, firing, facts, processes, wall=wall, revision=revision)


def replay(
    catalogue: Catalogue, run: str, rules: Rules, *, most: int
) -> tuple[list[FiringColumns], int]:
    """Apply rules to the newest `most` closed steps of a run, in the order of the run.

    Returns the firings in order, and the number of steps read.
    """
    reader = StepReader(catalogue, run, rules)
    watch = RuleWatch(rules.rules)
    fired: list[FiringColumns] = []
    read_steps = 0
    for attempt_id, step in reader.steps(most):
        facts = reader.facts(attempt_id, step)
        if facts is None:
            continue
        read_steps += 1
        at = RunStep(facts.attempt, step)
        changes = watch.evaluate(at, reader.values(facts))
        fired += [reader.explain(firing, facts) for firing in changes.fired]
    return fired, read_steps
