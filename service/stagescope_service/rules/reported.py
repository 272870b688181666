"""The findings and the lost data of a run's attempts, and what of them was known at a step."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Final

from stagescope_service.rules.memory import RunMemory
from stagescope_service.rules.step_rows import StepRows
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.tables import FindingRow, LossRow

ROWS: Final = 20_000
"""Maximum number of rows that a diagnosis reads."""
_FEW: Final = 200
"""Findings that are read by their ids; if more are new, all are read."""


class ReportedRows:
    """The findings and the lost data of attempts, by their ids in the catalogue."""

    def __init__(self, catalogue: Catalogue, ids: Sequence[int], memory: RunMemory) -> None:
        self._catalogue, self._ids, self._memory = catalogue, [*ids], memory

    @cached_property
    def findings(self) -> list[FindingRow]:
        """Every finding, the most recently seen first."""

        def read(ids: Sequence[str]) -> Mapping[str, FindingRow]:
            chosen = ids if len(ids) < _FEW else None
            rows = self._catalogue.findings(attempt_id=self._ids, finding_id=chosen, limit=ROWS)
            return {row["finding_id"]: row for row in rows}

        if not self._ids:
            return []
        marks = self._catalogue.finding_marks(self._ids, limit=ROWS)
        return [*self._memory.findings.of(marks, read).values()]

    @cached_property
    def losses(self) -> list[LossRow]:
        """All announced data that never arrived."""
        return self._catalogue.losses(attempt_id=self._ids, limit=ROWS) if self._ids else []


class KnownReports:
    """The findings and the lost data of a run that were known at a step.

    Args:
        reported: all of them.
        rows: the current closed steps of the run, up to `last`.
        last: the step; None: the newest.
    """

    def __init__(self, reported: ReportedRows, rows: StepRows, last: int | None) -> None:
        self._reported, self._rows, self._last = reported, rows, last

    @cached_property
    def findings(self) -> list[FindingRow]:
        """The findings of current steps, the most recently seen first."""
        newest = self.newest_attempt_id
        return [row for row in self.every if row["attempt_id"] == newest or self._is_current(row)]

    @cached_property
    def every(self) -> list[FindingRow]:
        """The same, with findings of repeated steps and of attempts that are over."""
        rows = self._reported.findings
        return [row for row in rows if self._was_known(row, row["first_wall"])]

    @cached_property
    def losses(self) -> list[LossRow]:
        """Announced data of current steps that never arrived."""
        known = (row for row in self._reported.losses if self._was_known(row, row["wall"]))
        return [row for row in known if self._is_current(row)]

    def of(self, kinds: Iterable[str]) -> list[FindingRow]:
        """Return the findings of some kinds (patterns with `*`), in the same order."""
        chosen = [
            rows
            for kind, rows in self._by_kind.items()
            if any(fnmatch.fnmatchcase(kind, each) for each in kinds)
        ]
        if len(chosen) < 2:
            return [row for _, row in chosen[0]] if chosen else []
        return [row for _, row in sorted(chain(*chosen), key=itemgetter(0))]

    @cached_property
    def _by_kind(self) -> Mapping[str, list[tuple[int, FindingRow]]]:
        """Kind -> its findings, each with its place among all."""
        found: dict[str, list[tuple[int, FindingRow]]] = defaultdict(list)
        for place, row in enumerate(self.findings):
            found[row["kind"]].append((place, row))
        return found

    @cached_property
    def newest_attempt_id(self) -> int | None:
        """The catalogue's id of the last step's attempt."""
        if self._last is not None and self._rows.rows:
            return self._rows.rows[-1].attempt_id
        return self._rows.ids[-1] if self._rows.ids else None

    def is_known(self, step: int | None) -> bool:
        """Return whether a step is no later than the last one; None (no step) always is."""
        return self._last is None or step is None or step <= self._last

    def is_last_of(self, attempt_id: int) -> bool:
        """Return whether an attempt had begun at the last step, and closed none after it."""
        if self._last is None:
            return True
        newest = self.newest_attempt_id
        if newest is not None and self._rows.number[attempt_id] > self._rows.number[newest]:
            return False
        return self.is_known(self._rows.newest_step_of(attempt_id))

    def _was_known(self, row: FindingRow | LossRow, wall: float) -> bool:
        """Return whether a row was known when the last step closed.

        Args:
            row: the row. Without a step it also was if its attempt closed no later step.
            wall: when it came, in Unix seconds.
        """
        attempt_id, step = row["attempt_id"], row["step"]
        if self._last is None or step is not None or attempt_id is None:
            return self.is_known(step)
        closed = self._rows.rows[-1].closed_wall if self._rows.rows else None
        return (closed is not None and wall <= closed) or self.is_last_of(attempt_id)

    def _is_current(self, row: FindingRow | LossRow) -> bool:
        """Return whether a row is current; without a step it is as current as its attempt."""
        attempt_id, step = row["attempt_id"], row["step"]
        newest = self.newest_attempt_id
        if attempt_id is None:
            return False
        number = self._rows.number[attempt_id]
        if newest is None or number >= self._rows.number[newest]:
            return True
        if step is None or self._rows.is_discarded(number, step):
            return False
        current = self._rows.of_step.get(step)
        return current is None or self._rows.number[current.attempt_id] <= number
