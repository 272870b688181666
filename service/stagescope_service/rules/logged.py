"""The numbers that a training logged in the current steps of a run."""

from __future__ import annotations

import fnmatch
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Final

from stagescope_service.rules.evidence import Series
from stagescope_service.rules.missing import StepKey
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.tables.declare import NON_FINITE_NAMES
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.schema import ROLES

_NON_FINITE_ROWS: Final = 20_000
_ORDER: Final = {role: at for at, role in enumerate(ROLES)}


class LoggedScalars:
    """The logged scalars of the current steps, each read once.

    Args:
        catalogue: the reading side of the store.
        ids: the catalogue's ids of the attempts.
        rows: the current closed steps, ascending.
        as_series: makes a series of a name, some of the rows, and a value for each.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        ids: Sequence[int],
        rows: Sequence[JsonObject],
        as_series: Callable[[str, Sequence[JsonObject], Sequence[float]], Series],
    ) -> None:
        self._catalogue = catalogue
        self._ids = ids
        self._rows = rows
        self._as_series = as_series
        self._series = lru_cache(maxsize=None)(self._read_series)

    @cached_property
    def names(self) -> list[str]:
        """The names of all scalars."""
        return sorted(self._catalogue.scalar_names(self._ids)) if self._ids else []

    def series(self, patterns: Sequence[str]) -> list[Series]:
        """Return the series of every scalar whose name matches a pattern, the first one first.

        Each role has its own, the actor's first. A value is the mean over the ranks and parts of
        the role that logged it; NaN where one of them is.
        """
        found = [series for name in self._matching(patterns) for series in self._series(name)]
        return [series for series in found if len(series)]

    def first_name(self, patterns: Sequence[str]) -> str | None:
        """Return the first name of a scalar that `series` returns series of."""
        return next((name for name in self._matching(patterns) if any(self._series(name))), None)

    @cached_property
    def non_finite(self) -> list[JsonObject]:
        """The values that are NaN or infinite, by step."""
        if not self._ids:
            return []
        rows = self._catalogue.scalars(
            self._ids, nonfinite=NON_FINITE_NAMES, limit=_NON_FINITE_ROWS
        )
        return [row for row in rows if (row["attempt_id"], row["step"]) in self._current]

    @cached_property
    def _current(self) -> frozenset[StepKey]:
        return frozenset((row["attempt_id"], row["step"]) for row in self._rows)

    def _matching(self, patterns: Sequence[str]) -> list[str]:
        names = [
            name
            for pattern in patterns
            for name in self.names
            if fnmatch.fnmatchcase(name, pattern)
        ]
        return [*dict.fromkeys(names)]

    def _read_series(self, name: str) -> list[Series]:
        if not self._rows:
            return []
        by_role: dict[str, dict[StepKey, list[tuple[float, int]]]] = {}
        first, last = self._rows[0]["step"], self._rows[-1]["step"]
        for row in self._catalogue.scalar_values(
            self._ids, name, by_rank=False, first=first, last=last
        ):
            step = row["step"]
            if step is None or (key := (row["attempt_id"], step)) not in self._current:
                continue
            bad = row["nan"] or row["posinf"] or row["neginf"]
            mean = math.nan if bad or row["mean"] is None else float(row["mean"])
            sums = by_role.setdefault(str(row["role"]), defaultdict(list))
            sums[key].append((mean, int(row["count"])))
        found = []
        for role in sorted(by_role, key=lambda role: (_ORDER.get(role, len(ROLES)), role)):
            sums = by_role[role]
            rows = [row for row in self._rows if (row["attempt_id"], row["step"]) in sums]
            values = [_weighted_mean(sums[row["attempt_id"], row["step"]]) for row in rows]
            label = f"{name} of {role}" if len(by_role) > 1 else name
            found.append(self._as_series(label, rows, values))
        return found


def _weighted_mean(values: Sequence[tuple[float, int]]) -> float:
    return sum(mean * count for mean, count in values) / sum(count for _, count in values)
