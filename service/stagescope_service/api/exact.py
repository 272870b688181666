"""Zero as proof over a run: which steps are exact, and where the streams first differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from fastapi import APIRouter

from stagescope_service.api.completeness import ALL_ROWS
from stagescope_service.api.desk import AtDesk, AttemptTarget, Row
from stagescope_service.api.measures import Measured
from stagescope_service.api.requests import Answer
from stagescope_service.statistics.cell import Field
from stagescope_service.statistics.exact import first_difference

router = APIRouter(tags=["runs"])

EXACT: Final = "exact"
DIFFERS: Final = "differs"
NOT_MEASURED: Final = "not measured"


class _Judged(NamedTuple):
    step: int
    verdict: str
    measured: Measured


@router.get("/exact")
def exact(desk: AtDesk, target: AttemptTarget) -> Answer:
    """Say in which steps trainer and rollout agree in every bit, and where they first do not.

    `exact` needs streams of two producers that are equal in all tokens; of equal streams of one
    producer, or of nobody knows whom, a step is `not measured`. `rows` holds a row for each range
    of steps of one verdict, with how many tokens it rests on; `first` is the first step that
    differs, with the first token in it by sample and position; `text` says all of it.
    """
    listed = desk.catalogue.steps(target.attempt_id, limit=ALL_ROWS)
    judged = [
        _judge(int(row["step"]), desk.measures.of(target.attempt_id, row))
        for row in reversed(listed)
        if row["has_whole"]
    ]
    rows = list(_ranges(judged))
    differing = next((each for each in judged if each.verdict == DIFFERS), None)
    first = None if differing is None else _first(differing)
    return Answer(
        {**target.heading(), "text": _text(rows, first), "first": first, "rows": rows, "next": None}
    )


def _judge(step: int, measured: Measured) -> _Judged:
    cell = measured.whole.total
    if cell.tokens and int(cell[Field.EQUAL]) < cell.tokens:
        return _Judged(step, DIFFERS, measured)
    proved = measured.comparability.verdict == EXACT and cell.masked == cell.tokens
    return _Judged(step, EXACT if proved else NOT_MEASURED, measured)


def _ranges(judged: Sequence[_Judged]) -> Iterator[Row]:
    for verdict, group in itertools.groupby(judged, key=lambda each: each.verdict):
        steps = list(group)
        cells = [each.measured.whole.total for each in steps]
        yield {
            "from_step": steps[0].step,
            "to_step": steps[-1].step,
            "steps": len(steps),
            "verdict": verdict,
            "tokens": sum(cell.tokens for cell in cells),
            "unequal": sum(cell.tokens - int(cell[Field.EQUAL]) for cell in cells),
        }


def _first(judged: _Judged) -> Row:
    found = first_difference(judged.measured.whole.summary)
    if found is None:  # the record of an older version
        return {"step": judged.step, "text": "in a token that was not kept"}
    return {"step": judged.step, **found.to_json(), "text": found.text}


def _text(rows: Sequence[Row], first: dict[str, Any] | None) -> str:
    if not rows:
        return "no step was measured"
    said = []
    for row in rows:
        one = row["from_step"] == row["to_step"]
        steps = f"{row['from_step']}" if one else f"{row['from_step']}-{row['to_step']}"
        if row["verdict"] == DIFFERS:
            assert first is not None
            said.append(f"{row['from_step']} first differs: {first['text']}")
            break
        why = f"proved on {row['tokens']} tokens" if row["verdict"] == EXACT else _WHY
        said.append(f"step{'' if one else 's'} {steps} {row['verdict']} ({why})")
    if first is not None:
        later = sum(row["steps"] for row in rows if row["verdict"] == DIFFERS) - 1
        total = sum(row["steps"] for row in rows if row["from_step"] > first["step"])
        within = next(row for row in rows if row["verdict"] == DIFFERS)
        total += within["steps"] - 1
        if total:
            said.append(f"of the {total} steps since then {later} differ")
    return "; ".join(said)


_WHY: Final = "equal, and one stream is a copy, or nobody said who computed them"
