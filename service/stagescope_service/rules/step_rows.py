"""The current closed steps of a run, and series of numbers over them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
from typing_extensions import Self

from stagescope_service.rules.evidence import Series
from stagescope_service.rules.memory import Numbers, RunMemory, window_of
from stagescope_service.rules.missing import StepKey
from stagescope_service.statistics.cell import Float64, Int64
from stagescope_service.statistics.step_metrics import VERSION
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.queries.curves import StepMark
from stagescope_service.store.queries.overview import ListedAttempt

STEPS: Final = 2000
"""Newest steps that a diagnosis looks at."""


class StepRows:
    """The newest `STEPS` current closed steps of some attempts, ascending.

    Args:
        catalogue: the reading side of the store.
        attempts: by number, ascending.
        last: the last step; None: the newest.
        memory: what was read of the run before.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        attempts: Sequence[ListedAttempt],
        last: int | None,
        memory: RunMemory,
    ) -> None:
        self._catalogue = catalogue
        self._memory = memory
        self.ids = [int(row["attempt_id"]) for row in attempts]
        self.number = {int(row["attempt_id"]): int(row["number"]) for row in attempts}
        """Attempt_id -> number."""
        self._resumed = [
            (row["number"], row["resumed_from_step"])
            for row in attempts
            if row["resumed_from_step"] is not None
        ]
        self.rows = self._read(last)
        self._every = self
        """All of them, if these are those up to an earlier step."""
        self._column = lru_cache(maxsize=None)(self._read_column)

    def _read(self, last: int | None) -> list[StepMark]:
        found: list[StepMark] = []
        seen: set[int] = set()
        with closing(self._catalogue.step_marks(self.ids, last=last)) as marks:
            for row in marks:
                step = row.step
                if row.closed_wall is None or step in seen:
                    continue
                if self._resumed and self.is_discarded(self.number[row.attempt_id], step):
                    continue
                seen.add(step)
                found.append(row)
                if len(found) >= STEPS:
                    break
        return found[::-1]

    def newest_step_of(self, attempt_id: int) -> int | None:
        """Return the newest step of an attempt, current or not, also after the last one of these;
        None: it has none."""
        return next((row["step"] for row in self._catalogue.steps(attempt_id, limit=1)), None)

    def is_discarded(self, number: int, step: int) -> bool:
        """Return whether an attempt later than `number` resumed before a step."""
        resumed_from = self._resumed
        return bool(resumed_from) and any(
            later > number and resumed < step for later, resumed in resumed_from
        )

    def until(self, last: int) -> Self:
        """Return those up to a step."""
        found = object.__new__(type(self))
        vars(found).update(
            (name, value) for name, value in vars(self).items() if name not in _OF_THE_ROWS
        )
        found.rows = self.rows[: bisect_right(self.rows, last, key=lambda row: row.step)]
        return found

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def keys(self) -> list[StepKey]:
        """(attempt_id, step) of each."""
        return [(row.attempt_id, row.step) for row in self.rows]

    @cached_property
    def of_step(self) -> Mapping[int, StepMark]:
        """Step -> its row."""
        return {row.step: row for row in self.rows}

    def summary_walls(self, keys: Iterable[StepKey]) -> dict[StepKey, float | None]:
        """Return when some steps were aggregated last, in Unix seconds."""
        return {key: self.of_step[key[1]].summary_wall for key in keys}

    @cached_property
    def closed(self) -> Mapping[StepKey, float | None]:
        """When each closed, in Unix seconds."""
        return {key: row.closed_wall for key, row in zip(self.keys, self.rows, strict=True)}

    # --- numbers --------------------------------------------------------------------------------
    def series(self, name: str, values: Mapping[StepKey, float]) -> Series:
        """Return a number of the steps that have it."""
        found = {at: values[key] for at, key in enumerate(self.keys) if key in values}
        return self.series_at(name, found)

    def series_at(self, name: str, values: Mapping[int, float]) -> Series:
        """Return a number of the steps that have it, by their places in `rows`, ascending."""
        places = np.fromiter(values, np.int64, len(values))
        return self._series(name, places, np.fromiter(values.values(), np.float64, len(values)))

    def metric(self, name: str) -> Series:
        """Return a published number of the steps that have it."""
        places, values = self._column(name)
        count = int(np.searchsorted(places, len(self.rows)))
        return self._series(name, places[:count], values[:count])

    def numbers_of_rows(self) -> Iterator[tuple[StepKey, Numbers | None]]:
        """Yield the key of each step, and its published numbers; None: it has none."""
        known = self._every.numbers
        return ((key, known.get(key)) for key in self.keys)

    def _series(self, name: str, places: Int64, values: Float64) -> Series:
        steps, attempts = self._every._axes
        return Series(name, steps[places], attempts[places], values)

    @cached_property
    def _axes(self) -> tuple[Int64, Int64]:
        steps = np.array([step for _, step in self.keys], np.int64)
        return steps, np.array([self.number[id] for id, _ in self.keys], np.int64)

    def _read_column(self, name: str) -> tuple[Int64, Float64]:
        """Return the places of the steps with a number in `rows`, and the number of each."""
        parts = [
            (places, values[:, names[name]])
            for names, places, values in self._tables
            if name in names
        ]
        if not parts:
            return np.empty(0, np.int64), np.empty(0, np.float64)
        places = np.concatenate([places for places, _ in parts])
        order = np.argsort(places)
        return places[order], np.concatenate([values for _, values in parts])[order]

    @cached_property
    def _tables(self) -> list[tuple[Mapping[str, int], Int64, Float64]]:
        """(name -> column, places in `rows`, numbers `[steps, columns]`) of the steps that publish
        the same names."""
        known = self.numbers
        alike: dict[int, list[tuple[int, Numbers]]] = defaultdict(list)
        for at, key in enumerate(self.keys):
            if key in known:
                numbers = known[key]
                alike[id(numbers.places)].append((at, numbers))
        return [
            (
                own[0][1].places,
                np.array([at for at, _ in own], np.int64),
                np.array([numbers.values for _, numbers in own], np.float64),
            )
            for own in alike.values()
        ]

    @cached_property
    def numbers(self) -> Mapping[StepKey, Numbers]:
        """The published numbers of the steps that have some."""
        walls = zip(self.keys, (row.summary_wall for row in self.rows), strict=True)
        marks = {key: wall for key, wall in walls if wall is not None}

        def read(keys: Sequence[StepKey]) -> Mapping[StepKey, Numbers]:
            every = self._catalogue.every_number(self.ids, version=VERSION, **window_of(keys))
            return {
                key: Numbers(found.metrics, found.verdict, found.suspects or ())
                for found in every
                if found.verdict is not None
                if found.summary_wall == marks.get(key := (found.attempt_id, found.step))
            }

        return self._memory.numbers.of(marks, read)


_OF_THE_ROWS: Final = frozenset(
    {"rows", "keys", "of_step", "closed", "_axes", "_tables", "numbers"}
)
