"""Zero as proof over a run: which steps are exact, and where the streams first differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from fastapi import APIRouter

from stagescope_service.api.desk import AtDesk, AttemptTarget, Desk, Row
from stagescope_service.api.measures import Measured
from stagescope_service.api.models import runs as models
from stagescope_service.api.requests import Answer
from stagescope_service.api.target import Target
from stagescope_service.statistics.exact import first_difference
from stagescope_service.statistics.step_metrics import VERSION, unequal_tokens

router = APIRouter(tags=["runs"])

EXACT: Final = "exact"
DIFFERS: Final = "differs"
NOT_MEASURED: Final = "not measured"


class _Judged(NamedTuple):
    step: int
    verdict: str
    tokens: int
    unequal: int


@router.get("/exact", response_model=models.Exact)
def exact(desk: AtDesk, target: AttemptTarget) -> Answer:
    """Say in which steps trainer and rollout agree in every bit, and where they first do not.

    `exact` needs streams of two producers that are equal in all tokens; of equal streams of one
    producer, or of nobody knows whom, a step is `not measured`. `rows` holds a row for each range
    of steps of one verdict, with how many tokens it rests on; `first` is the first step that
    differs, with the first token in it by sample and position; `text` says all of it.
    """
    listed = desk.catalogue.step_metrics([target.attempt_id], version=VERSION, numbers=None)
    steps = {int(row["step"]): row for row in listed if row["has_whole"]}
    judged = [_judge(desk, target, steps[step]) for step in sorted(steps)]
    rows = list(_ranges(judged))
    differing = next((each.step for each in judged if each.verdict == DIFFERS), None)
    first = None
    if differing is not None:
        first = _first(differing, desk.measures.of(target.attempt_id, steps[differing]))
    return Answer(
        {**target.heading(), "text": _text(rows, first), "first": first, "rows": rows, "next": None}
    )


def _judge(desk: Desk, target: Target, row: Row) -> _Judged:
    """Judge a step by the counts stored of it; where an earlier release stored it, anew."""
    tokens, masked, unequal = (row[f"{name}tokens"] for name in ("", "masked_", "unequal_"))
    verdict = row["verdict"]
    if None in (tokens, masked, unequal):
        measured = desk.measures.of(target.attempt_id, row)
        cell = measured.whole.total
        tokens, masked, unequal = cell.tokens, cell.masked, unequal_tokens(cell)
        verdict = measured.comparability.verdict
    proved = verdict == EXACT and masked == tokens
    judged = DIFFERS if unequal else EXACT if proved else NOT_MEASURED
    return _Judged(int(row["step"]), judged, tokens, unequal)


def _ranges(judged: Sequence[_Judged]) -> Iterator[Row]:
    for verdict, group in itertools.groupby(judged, key=lambda each: each.verdict):
        steps = list(group)
        yield {
            "from_step": steps[0].step,
            "to_step": steps[-1].step,
            "steps": len(steps),
            "verdict": verdict,
            "tokens": sum(each.tokens for each in steps),
            "unequal": sum(each.unequal for each in steps),
        }


def _first(step: int, measured: Measured) -> Row:
    found = first_difference(measured.whole.summary)
    if found is None:  # the record of an older version
        return {"step": step, "text": "in a token that was not kept"}
    return {"step": step, **found.to_json(), "text": found.text}


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
