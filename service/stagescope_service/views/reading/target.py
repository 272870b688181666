"""Finds the run, attempt and step that a request names; errors name what exists instead."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import time
from collections.abc import Iterable, Sequence
from typing import Final, TypedDict

from stagescope_service.core.registry import base_key, given_key
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.queries.overview import ListedAttempt, ListedStep
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.pages import StepName
from stagescope_service.views.reading.rows import Lineage
from stagescope_wire.errors import NotFound
from stagescope_wire.links import Link
from stagescope_wire.names import requested_run

_LIVE_SECONDS: Final = 0.5
"""Greatest age of `also_live`: its query counts over every process of every run."""
_NAMED: Final = 8
"""Most runs, attempts or steps that an error lists."""


class LiveRun(TypedDict):
    """The newest attempt of a run that is live."""

    run: str
    attempt: int


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """An attempt of a run, and one step of it where the request names one."""

    attempt: ListedAttempt
    also_live: list[LiveRun]
    display_name: str
    """The text that people see for the run."""
    step: ListedStep | None = None
    superseded_by: int | None = None
    """Number of the newest attempt that repeats the step."""

    @property
    def run(self) -> str:
        """The run's name."""
        return self.attempt["run"]

    @property
    def shown_run(self) -> str:
        """The run as people see it, with its name if that is another."""
        return _shown(self.run, self.display_name)

    @property
    def attempt_id(self) -> int:
        """The attempt's key in the catalogue."""
        return self.attempt["attempt_id"]

    @property
    def number(self) -> int:
        """The attempt's number in its run."""
        return self.attempt["number"]

    @property
    def step_row(self) -> ListedStep:
        """The row of the step; only of a target that names one."""
        assert self.step is not None
        return self.step

    @property
    def step_number(self) -> int:
        """The trainer's step; only of a target that names one."""
        return self.step_row["step"]

    def heading(self) -> JsonObject:
        """Return the fields that every answer begins with."""
        fields: JsonObject = {**self.run_heading(), "attempt": self.number}
        if self.step is not None:
            fields["step"] = self.step_number
            fields["superseded_by"] = self.superseded_by
        return fields

    def run_heading(self) -> JsonObject:
        """Return those of an answer about all attempts."""
        fields: JsonObject = {"run": self.run, "also_live": self.also_live}
        return (
            fields
            if self.display_name == self.run
            else fields | {"display_name": self.display_name}
        )


class Finder:
    """Finds targets in the catalogue; `run` None means the run whose training stage began last."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._live: tuple[float, list[LiveRun]] | None = None
        """Monotonic seconds of the query, and its answer."""

    def within(self, catalogue: Catalogue) -> Finder:
        """Return a finder of what a snapshot of the catalogue has."""
        found = copy.copy(self)
        found._catalogue = catalogue
        return found

    def attempt(self, run: str | None, number: int | None = None) -> Target:
        """Return an attempt, the run's newest where `number` is None.

        Raises:
            NotFound: no such run or attempt; names those that exist.
        """
        name = self._run(run)
        found = self._catalogue.find_attempt(name, number)
        if found is None:
            raise self._no_attempt(name, number)
        return Target(found, self._also_live(name), self._catalogue.display_name(name))

    def step(
        self, run: str | None, number: int | None, step: int | None, *, key: str | None = None
    ) -> Target:
        """Return a step, of the newest attempt that has it where `number` is None.

        Args:
            run: the run's name.
            number: the attempt's number.
            step: the trainer's step; None: the newest.
            key: search only the attempts of this attempt key.

        Raises:
            NotFound: no such run, attempt or step; names those that exist.
        """
        name = self._run(run)
        attempt, row = self._attempt_with(name, number, step, key)
        lineage = Lineage(self._catalogue.attempts(name))
        shown = self._catalogue.display_name(name)
        return Target(attempt, self._also_live(name), shown, row, lineage.superseded_by(row))

    def named(
        self, run: str | None, number: int | None, step: StepName, *, key: str | None = None
    ) -> Target:
        """Return a step by its number or by a word.

        `latest` is the newest step. `measured` is the newest closed one with numbers, `captured`
        the newest with operators; without any they are the latest. If the newest attempt has no
        such step, it is one of an earlier attempt, unless `number` or `key` names the attempt.

        Raises:
            NotFound: no such run, attempt or step; names those that exist.
        """
        if isinstance(step, int):
            return self.step(run, number, step, key=key)
        latest = self.step(run, number, None, key=key)
        is_of_attempt = number is not None or key is not None
        found: Target | None = None
        if step == "measured":
            found = self.measured(latest.run, latest.number if is_of_attempt else None)
        elif step == "captured":
            found = self._captured(latest, is_of_attempt=is_of_attempt)
        return found or latest

    def _captured(self, latest: Target, *, is_of_attempt: bool) -> Target | None:
        attempts = [latest.attempt] if is_of_attempt else self._catalogue.attempts(latest.run)
        for each in attempts:
            for newest in self._catalogue.operator_steps(each["attempt_id"], limit=1):
                return self.step(latest.run, each["number"], newest)
        return None

    def measured(self, run: str, number: int | None) -> Target | None:
        """Return the newest closed step with numbers, of those that no later attempt repeats.

        Args:
            run: the run's name.
            number: the attempt's number: also of steps that a later attempt repeats.
        """
        attempt_id = None if number is None else self.attempt(run, number).attempt_id
        for row in self._catalogue.steps(
            attempt_id, run=run, superseded=False if number is None else None, measured=True,
            limit=1,
        ):  # fmt: skip
            return self.step(run, row["attempt"], row["step"])
        return None

    def run(self, text: str) -> str:
        """Return the name of the run that a text names: its name, or as it was given or is shown.

        The run of this name comes before one that is shown so.

        Raises:
            NotFound: no such run, or several are shown so; names those that exist.
        """
        name = requested_run(text)
        if self._catalogue.has_run(name):
            return name
        shown = self._catalogue.runs_shown_as(text)
        if len(shown) > 1:
            more = f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
            raise NotFound(
                f"{len(shown)} runs are shown as {text!r:.200}",
                expected=f"the name of one: {', '.join(shown[:_NAMED])}{more}",
                advice="give this name instead; `stagescope runs --rename` shows one otherwise",
            )
        if not shown:
            raise self._no_run(text)
        return shown[0]

    def _run(self, run: str | None) -> str:
        if run is not None:
            name = self.run(run)
            if self._catalogue.is_being_deleted(name):
                raise NotFound(f"run {self._shown(name)} is being deleted", see=(Link("runs"),))
            return name
        training = self._catalogue.training_attempt()
        if training is not None:
            return training["run"]
        runs = self._catalogue.runs(limit=1)
        if not runs:
            raise NotFound(
                "the service has no run yet",
                advice="start a training that reports to it: stagescope_workers.init(run=...)",
            )
        return runs[0]["run"]

    def _attempt_with(
        self, run: str, number: int | None, step: int | None, key: str | None
    ) -> tuple[ListedAttempt, ListedStep]:
        catalogue = self._catalogue
        if key is not None:
            candidates: Iterable[ListedAttempt] = self._of_key(run, number, key)
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
            # Steps are listed newest first, so that one row is enough.
            before = None if step is None else step + 1
            newest = catalogue.steps(attempt_id, before=before, limit=1)
            if newest and (step is None or newest[0]["step"] == step):
                return attempt, newest[0]
        raise self._no_step(run, number, step)

    def _of_key(self, run: str, number: int | None, key: str) -> list[ListedAttempt]:
        """Return the attempts of a key, newest first: several where its ranks were recreated."""
        base = given_key(key)
        with_key = [row for row in self._catalogue.attempts(run) if base_key(row["key"]) == base]
        matching = [row for row in with_key if number in (None, row["number"])]
        if matching:
            return matching
        if with_key:
            numbers = sorted(row["number"] for row in with_key)
            raise NotFound(
                f"attempt {number} of run {self._shown(run)} has another key than {key!r:.100}",
                expected=_one_of(numbers, number or 0),
            )
        raise NotFound(
            f"run {self._shown(run)} has no attempt of key {key!r:.100}",
            see=(Link("attempts", run=run),),
        )

    def _also_live(self, run: str) -> list[LiveRun]:
        cached = self._live
        if cached is None or time.monotonic() - cached[0] > _LIVE_SECONDS:
            rows = self._catalogue.live_runs()
            runs: list[LiveRun] = [
                {"run": row["run"], "attempt": row["attempt"]}
                for row in rows
                if row["attempt"] is not None
            ]
            cached = self._live = (time.monotonic(), runs)
        return [each for each in cached[1] if each["run"] != run]

    def _no_run(self, run: str) -> NotFound:
        names = self._catalogue.run_names()
        known = {
            text: _shown(name, shown)
            for name, shown in reversed(names)
            for text in (shown or name, name)
        }
        close = difflib.get_close_matches(run, [*known], n=2 * _NAMED)
        near = [*dict.fromkeys(known[text] for text in close)][:_NAMED]
        listed = near or [_shown(*each) for each in names[:_NAMED]]
        if not listed:
            return NotFound(f"there is no run {run!r:.200}", see=(Link("runs"),))
        expected = f"one of {', '.join(listed)}"
        if len(names) > len(listed):
            expected += f" ({'the nearest' if near else 'the newest'} of {len(names)} runs)"
        return NotFound(
            f"there is no run {run!r:.200}",
            expected=expected,
            see=(Link("runs"),),
        )

    def _shown(self, run: str) -> str:
        return _shown(run, self._catalogue.display_name(run))

    def _no_attempt(self, run: str, number: int | None) -> NotFound:
        numbers = sorted(row["number"] for row in self._catalogue.attempts(run))
        wrong = f"run {self._shown(run)} has no attempt {'yet' if number is None else number}"
        return NotFound(wrong, expected=_one_of(numbers, number or 0) if numbers else "")

    def _no_step(self, run: str, number: int | None, step: int | None) -> NotFound:
        if number is None:
            rows = self._catalogue.steps(run=run, superseded=False)
            rows = rows or self._catalogue.steps(run=run)  # a new attempt has no step yet
        else:
            found = self._catalogue.find_attempt(run, number)
            rows = [] if found is None else self._catalogue.steps(found["attempt_id"])
        steps = sorted({row["step"] for row in rows})
        shown = f"run {self._shown(run)}"
        owner = shown if number is None else f"attempt {number} of {shown}"
        wrong = f"{owner} has no step {'yet' if step is None else step}"
        if not steps:
            return NotFound(wrong, advice="a step exists once a rank began a stage in it")
        return NotFound(wrong, expected=_one_of(steps, step or 0), see=(Link("steps", run=run),))


def _shown(name: str, display_name: str | None) -> str:
    """Return a run as people see it, with its name if that is another; questions accept both."""
    return name if display_name in (None, name) else f"{display_name!r} ({name})"


def _one_of(numbers: Sequence[int], near: int) -> str:
    nearest = sorted(sorted(numbers, key=lambda item: (abs(item - near), item))[:_NAMED])
    text = f"one of {', '.join(map(str, nearest))}"
    if len(numbers) > len(nearest):
        text += f" (the nearest of {len(numbers)}, from {numbers[0]} to {numbers[-1]})"
    return text
