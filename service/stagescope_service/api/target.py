"""Which run, attempt and step a question is about, and what was there to ask for instead."""

from __future__ import annotations

import dataclasses
import difflib
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from stagescope.wire.errors import NotFound
from stagescope.wire.schema import check_run_name
from stagescope_service.core.registry import base_key, given_key
from stagescope_service.store.catalogue import Catalogue

Row = dict[str, Any]

_LIVE_SECONDS: Final = 0.5
"""How long `also_live` may be old: it counts over every process of every run."""
_NAMED: Final = 8
"""How many of what there is an error names."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """An attempt of a run, and where asked one step of it."""

    attempt: Row
    also_live: list[Row]
    step: Row | None = None
    superseded_by: int | None = None

    @property
    def run(self) -> str:
        """The run's name."""
        return str(self.attempt["run"])

    @property
    def attempt_id(self) -> int:
        """The attempt's key in the catalogue."""
        return int(self.attempt["attempt_id"])

    @property
    def number(self) -> int:
        """The attempt's number in its run."""
        return int(self.attempt["number"])

    def heading(self) -> dict[str, Any]:
        """Return what every answer begins with."""
        said: dict[str, Any] = {"run": self.run, "attempt": self.number}
        if self.step is not None:
            said["step"] = self.step["step"]
            said["superseded_by"] = self.superseded_by
        return {**said, "also_live": self.also_live}


class Finder:
    """Finds targets in the catalogue; `run` None is the run whose training stage began last."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._live: tuple[float, list[Row]] | None = None

    def attempt(self, run: str | None, number: int | None = None) -> Target:
        """Return an attempt, the run's newest where `number` is None.

        Raises:
            NotFound: no such run or attempt, with those that there are.
        """
        name = self._run(run)
        found = self._catalogue.find_attempt(name, number)
        if found is None:
            raise self._no_attempt(name, number)
        return Target(found, self._also_live(name))

    def step(
        self, run: str | None, number: int | None, step: int | None, *, key: str | None = None
    ) -> Target:
        """Return a step; of the newest attempt that has it where `number` is None.

        With `key` only the attempts of that attempt key are looked at.

        Raises:
            NotFound: no such run, attempt or step, with those that there are.
        """
        name = self._run(run)
        attempt, row = self._attempt_with(name, number, step, key)
        superseded = superseded_by(row, attempt["number"], self._catalogue.attempts(name))
        return Target(attempt, self._also_live(name), row, superseded)

    def _run(self, run: str | None) -> str:
        if run is not None:
            check_run_name(run)
            if self._catalogue.run(run) is None:
                raise self._no_run(run)
            return run
        training = self._catalogue.training_attempt()
        if training is not None:
            return str(training["run"])
        runs = self._catalogue.runs(limit=1)
        if not runs:
            raise NotFound(
                "the service has no run yet",
                advice="start a training that reports to it: stagescope_workers.init(run=...)",
            )
        return str(runs[0]["run"])

    def _attempt_with(
        self, run: str, number: int | None, step: int | None, key: str | None
    ) -> tuple[Row, Row]:
        catalogue = self._catalogue
        if key is not None:
            candidates: Iterable[Row] = self._of_key(run, number, key)
        elif number is not None:
            attempt = catalogue.find_attempt(run, number)
            if attempt is None:
                raise self._no_attempt(run, number)
            candidates = [attempt]
        elif step is not None:
            attempt = catalogue.attempt_of_step(run, step)
            candidates = [] if attempt is None else [attempt]
        else:
            candidates = catalogue.attempts(run)
        for attempt in candidates:
            attempt_id = attempt["attempt_id"]
            # A step is found by its key; the latest is the first of the list, newest first.
            before = None if step is None else step + 1
            newest = catalogue.steps(attempt_id, before=before, limit=1)
            if newest and (step is None or newest[0]["step"] == step):
                return attempt, newest[0]
        raise self._no_step(run, number, step)

    def _of_key(self, run: str, number: int | None, key: str) -> list[Row]:
        """Return the attempts of a key, newest first: several where its ranks were made anew."""
        wanted = given_key(key)
        of_key = [row for row in self._catalogue.attempts(run) if base_key(row["key"]) == wanted]
        found = [row for row in of_key if number in (None, row["number"])]
        if found:
            return found
        if of_key:
            numbers = sorted(int(row["number"]) for row in of_key)
            raise NotFound(
                f"attempt {number} of run {run} has another key than {key!r:.100}",
                expected=_one_of(numbers, number or 0),
            )
        raise NotFound(
            f"run {run} has no attempt of key {key!r:.100}", advice=f"see /runs/{run}/attempts"
        )

    def _also_live(self, run: str) -> list[Row]:
        known = self._live
        if known is None or time.monotonic() - known[0] > _LIVE_SECONDS:
            rows = self._catalogue.live_runs()
            found = [{"run": row["run"], "attempt": row["attempt"]} for row in rows]
            known = self._live = (time.monotonic(), found)
        return [row for row in known[1] if row["run"] != run]

    def _no_run(self, run: str) -> NotFound:
        names = [str(row["run"]) for row in self._catalogue.runs(limit=200)]
        close = difflib.get_close_matches(run, names, n=_NAMED) or names[:_NAMED]
        expected = f"one of {', '.join(close)}" if close else ""
        return NotFound(f"there is no run {run!r}", expected=expected, advice="see /runs")

    def _no_attempt(self, run: str, number: int | None) -> NotFound:
        numbers = sorted(int(row["number"]) for row in self._catalogue.attempts(run))
        wrong = f"run {run} has no attempt {'yet' if number is None else number}"
        return NotFound(wrong, expected=_one_of(numbers, number or 0) if numbers else "")

    def _no_step(self, run: str, number: int | None, step: int | None) -> NotFound:
        found = self._catalogue.steps(run=run)
        if number is not None:
            found = [row for row in found if row["attempt"] == number]
        there = sorted({int(row["step"]) for row in found})
        where = f"run {run}" if number is None else f"attempt {number} of run {run}"
        wrong = f"{where} has no step {'yet' if step is None else step}"
        if not there:
            return NotFound(wrong, advice="a step is there once a rank began a stage in it")
        return NotFound(wrong, expected=_one_of(there, step or 0), advice="see /steps")


def superseded_by(step: Row, number: int, attempts: Sequence[Row]) -> int | None:
    """Return the number of the newest attempt that did (or will do) this step again, or None.

    An attempt that resumed before the step throws away what the step had made, also while it has
    not come as far again.
    """
    if step.get("superseded_by") is not None:
        return int(step["superseded_by"])
    later = [
        int(row["number"])
        for row in attempts
        if row["number"] > number
        and row["resumed_from_step"] is not None
        and row["resumed_from_step"] < step["step"]
    ]
    return max(later, default=None)


def _one_of(numbers: Sequence[int], near: int) -> str:
    nearest = sorted(sorted(numbers, key=lambda item: (abs(item - near), item))[:_NAMED])
    text = f"one of {', '.join(map(str, nearest))}"
    if len(numbers) > len(nearest):
        text += f" (the nearest of {len(numbers)}, from {numbers[0]} to {numbers[-1]})"
    return text
