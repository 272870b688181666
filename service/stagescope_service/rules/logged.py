"""The numbers that a training logged in the current steps of a run."""

from __future__ import annotations

import fnmatch
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Final

from stagescope_service.rules.evidence import Series
from stagescope_service.rules.memory import RunMemory, window_of
from stagescope_service.rules.missing import StepKey
from stagescope_service.rules.step_rows import StepRows
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.tables import ScalarRow
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.schema import ROLES

_NON_FINITE_ROWS: Final = 20_000
_ORDER: Final = {role: at for at, role in enumerate(ROLES)}


class LoggedScalars:
    """The logged scalars of the current steps, each read once.

    Args:
        catalogue: the reading side of the store.
        memory: what was read of the run before.
        rows: the current closed steps.
    """

    def __init__(self, catalogue: Catalogue, memory: RunMemory, rows: StepRows) -> None:
        self._catalogue = catalogue
        self._memory = memory
        self._ids = rows.ids
        self._rows = rows
        self._series = lru_cache(maxsize=None)(self._read_series)

    @cached_property
    def names(self) -> list[str]:
        """The names of all scalars."""
        return sorted(self._catalogue.scalar_names(self._ids)) if self._ids else []

    def series(self, patterns: Sequence[str]) -> list[Series]:
        """Return the series of every scalar whose name matches a pattern, the first one first.

        Each role and stage has its own: the actor's come first. Of one role, those that the newest
        attempt logs precede the others, and the one with most steps is the first. A value is the
        mean over the ranks and parts that logged it; NaN where one of them is.
        """
        found = [series for name in self._matching(patterns) for series in self._series(name)]
        return [series for series in found if len(series)]

    def first_name(self, patterns: Sequence[str]) -> str | None:
        """Return the first name of a scalar that `series` returns series of."""
        return next((name for name in self._matching(patterns) if any(self._series(name))), None)

    @cached_property
    def non_finite(self) -> list[JsonObject]:
        """The values that are NaN or infinite, by step."""

        def read(keys: Sequence[StepKey]) -> Mapping[StepKey, list[ScalarRow]]:
            found: dict[StepKey, list[ScalarRow]] = defaultdict(list)
            for row in self._catalogue.non_finite_scalars(
                self._ids, limit=_NON_FINITE_ROWS, **window_of(keys)
            ):
                if row["step"] is not None:
                    found[row["attempt_id"], row["step"]].append(row)
            return found

        by_step = self._memory.non_finite.of(self._rows.closed, read)
        return [row for rows in by_step.values() for row in rows]

    def _matching(self, patterns: Sequence[str]) -> list[str]:
        names = [
            name
            for pattern in patterns
            for name in self.names
            if fnmatch.fnmatchcase(name, pattern)
        ]
        return [*dict.fromkeys(names)]

    def _read_series(self, name: str) -> list[Series]:
        of_place: dict[tuple[str, str | None], dict[int, float]] = defaultdict(dict)
        means = self._memory.scalar(self._catalogue, self._ids, name, self._rows.closed)
        for at, key in enumerate(self._rows.keys):
            for stage, role, mean in means.get(key, ()):
                of_place[role, stage][at] = mean if math.isfinite(mean) else math.nan
        by_role: dict[str, dict[str | None, dict[int, float]]] = defaultdict(dict)
        for (role, stage), values in of_place.items():
            by_role[role][stage] = values
        series = []
        for role in sorted(by_role, key=lambda role: (_ORDER.get(role, len(ROLES)), role)):
            own = [
                self._rows.series_at(_label(name, role, stage, by_role), values)
                for stage, values in by_role[role].items()
            ]
            own.sort(key=lambda each: (-int(each.attempts[-1]), -len(each), each.name))
            series += own
        return series


def _label(
    name: str, role: str, stage: str | None, by_role: Mapping[str, Mapping[str | None, object]]
) -> str:
    """Return the name of a scalar, with its role and its stage where others logged it, too."""
    label = f"{name} of {role}" if len(by_role) > 1 else name
    if len(by_role[role]) == 1:
        return label
    if stage is None:
        return f"{label} without a stage"
    return f"{label} in {stage}" if len(by_role) > 1 else f"{label} of {stage}"
