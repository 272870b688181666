"""The current closed steps of a run, and series of numbers over them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
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
from stagescope_service.store.queries.measurements import StepNumbers
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

    def _read(self, last: int | None) -> list[StepNumbers]:
        found: list[StepNumbers] = []
        seen: set[int] = set()
        for row in self._catalogue.step_metrics(self.ids, version=VERSION, last=last, numbers=None):
            step, number = row["step"], self.number[row["attempt_id"]]
            if row["closed_wall"] is None or step in seen or self.is_discarded(number, step):
                continue
            seen.add(step)
            found.append(row)
            if len(found) >= STEPS:
                break
        return found[::-1]

    def is_discarded(self, number: int, step: int) -> bool:
        """Return whether an attempt later than `number` resumed before a step."""
        return any(later > number and resumed < step for later, resumed in self._resumed)

    def until(self, last: int) -> Self:
        """Return those up to a step."""
        found = object.__new__(type(self))
        vars(found).update(
            (name, value) for name, value in vars(self).items() if name not in _OF_THE_ROWS
        )
        found.rows = self.rows[: bisect_right(self.rows, last, key=lambda row: row["step"])]
        return found

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def keys(self) -> list[StepKey]:
        """(attempt_id, step) of each."""
        return [(row["attempt_id"], row["step"]) for row in self.rows]

    @cached_property
    def closed(self) -> Mapping[StepKey, float | None]:
        """When each closed, in Unix seconds."""
        walls = (row["closed_wall"] for row in self.rows)
        return dict(zip(self.keys, walls, strict=True))

    # --- numbers --------------------------------------------------------------------------------
    def series(self, name: str, values: Mapping[StepKey, float]) -> Series:
        """Return a number of the steps that have it."""
        places = np.array([at for at, key in enumerate(self.keys) if key in values], np.int64)
        numbers = [values[self.keys[at]] for at in places.tolist()]
        return self._series(name, places, np.array(numbers, np.float64))

    def metric(self, name: str) -> Series:
        """Return a published number of the steps that have it."""
        places, values = self._column(name)
        count = int(np.searchsorted(places, len(self.rows)))
        return self._series(name, places[:count], values[:count])

    def is_measured(self, key: StepKey) -> bool:
        """Return whether a step has numbers."""
        return key in self._every.numbers

    def _series(self, name: str, places: Int64, values: Float64) -> Series:
        steps, attempts = self._every._axes
        return Series(name, steps[places], attempts[places], values)

    @cached_property
    def _axes(self) -> tuple[Int64, Int64]:
        steps = np.array([step for _, step in self.keys], np.int64)
        return steps, np.array([self.number[id] for id, _ in self.keys], np.int64)

    def _read_column(self, name: str) -> tuple[Int64, Float64]:
        """Return the places of the steps with a number in `rows`, and the number of each."""
        found = (numbers.get(name) for numbers in self._of_rows())
        known = [(at, value) for at, value in enumerate(found) if value is not None]
        places, values = zip(*known, strict=True) if known else ((), ())
        return np.array(places, np.int64), np.array(values, np.float64)

    def _of_rows(self) -> Iterator[Numbers]:
        none = Numbers({})
        return (self.numbers.get(key, none) for key in self.keys)

    @cached_property
    def numbers(self) -> Mapping[StepKey, Numbers]:
        """The published numbers of the steps that have some."""
        marks = {
            key: row["summary_wall"]
            for key, row in zip(self.keys, self.rows, strict=True)
            if row["verdict"] is not None
        }
        return self._memory.numbers.of(marks, self._read_numbers)

    def _read_numbers(self, keys: Sequence[StepKey]) -> Mapping[StepKey, Numbers]:
        found = self._catalogue.every_number(self.ids, version=VERSION, **window_of(keys))
        return {(attempt_id, step): Numbers(numbers) for attempt_id, step, numbers in found}


_OF_THE_ROWS: Final = frozenset({"rows", "keys", "closed", "_axes", "numbers"})
