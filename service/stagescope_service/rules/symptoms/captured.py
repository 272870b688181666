"""Evidence of findings in captured steps: whether they last, though few steps are captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from stagescope_service.rules.evidence import ENDED_AFTER, Evidence, PresumedEnd
from stagescope_service.rules.history import RunHistory
from stagescope_service.store.tables import FindingRow, OperatorTableRow
from stagescope_wire.render import counted

_Place: TypeAlias = tuple[str | None, int | None, str | None]
"""Role, rank and stage of a capture."""


def of_captures(history: RunHistory, rows: Sequence[FindingRow], found: Evidence) -> Evidence:
    """Return the evidence of findings in captured steps, with its presumed end.

    A step that was not captured says nothing about its operators. The findings seem to have ended
    if a later capture is finite in all their places, or if a later attempt closed several steps.

    Args:
        history: of the run.
        rows: the findings.
        found: their evidence.
    """
    found = dataclasses.replace(found, last_step=None, against=())
    steps = [(row["attempt_id"], row["step"]) for row in rows]
    known = [(each, step) for each, step in steps if each is not None and step is not None]
    if len(known) < len(steps):
        return found
    last_id, last = max(known, key=lambda each: (history.number_of(each[0]), each[1]))
    number = history.number_of(last_id)
    again = _finite_again(history, rows, last_id, last)
    if again is not None:
        end = PresumedEnd(last, f"the operators of these ranks are finite in step {again}")
        return dataclasses.replace(found, presumed_end=end)
    later = [step for step in history.steps if step.attempt > number]
    if not later:
        return found
    newest = later[-1].attempt
    if len(later) <= ENDED_AFTER:
        text = f"no capture of attempt {newest} shows that these ranks are finite"
        return dataclasses.replace(found, against=(text,))
    why = f"{counted(len(later), 'step')} of later attempts closed without a symptom of it"
    return dataclasses.replace(found, presumed_end=PresumedEnd(last, why))


def _finite_again(
    history: RunHistory, rows: Sequence[FindingRow], last_id: int, last: int
) -> int | None:
    """Return the newest captured step after the findings in which all their places are finite.

    A place counts only if this capture recorded at least half the calls of the last step with a
    finding: a capture of a few modules says nothing about the others.
    """
    places: set[_Place] = {(row["role"], row["rank"], row["stage"]) for row in rows}
    before = _calls(history.operators(last_id, last))
    for again in history.captured_after(history.number_of(last_id), last):
        after = _calls(filter(_is_finite, history.operators(again.attempt_id, again.step)))
        if all(after.get(each, 0) >= max(before.get(each, 0) / 2, 1) for each in places):
            return again.step
    return None


def _is_finite(table: OperatorTableRow) -> bool:
    """Return whether no operator of a dump is certainly wrong: masks are infinite, too."""
    is_wrong = table["first_non_finite"] is not None and bool(table["certain"])
    return not (is_wrong or table["truncated"])


def _calls(tables: Iterable[OperatorTableRow]) -> dict[_Place, int]:
    """Return the number of calls of each place."""
    found: dict[_Place, int] = {}
    for each in tables:
        place = each["role"], each["rank"], each["stage"]
        found[place] = found.get(place, 0) + (each["calls"] or 0)
    return found
