"""Zero as proof over a run: which steps are exact, and where the streams first differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from fastapi import APIRouter

from stagescope_service.api.desk import AtDesk, AttemptNumber, Desk, Row, Run
from stagescope_service.api.measures import Measured
from stagescope_service.api.models import runs as models
from stagescope_service.api.requests import Answer
from stagescope_service.api.rows import Lineage
from stagescope_service.statistics.exact import first_difference, unequal_tokens
from stagescope_service.statistics.step_metrics import VERSION
from stagescope_service.store.parts import incarnation_of

router = APIRouter(tags=["runs"])

EXACT: Final = "exact"
DIFFERS: Final = "differs"
NOT_MEASURED: Final = "not measured"


class _Judged(NamedTuple):
    step: int
    attempt: int
    verdict: str
    tokens: int
    unequal: int
    non_finite: int


@router.get("/exact", response_model=models.Exact)
def exact(desk: AtDesk, run: Run = None, attempt: AttemptNumber = None) -> Answer:
    """Say in which steps trainer and rollout agree in every bit, and where they first do not.

    `exact` needs streams of two producers that are equal in all tokens; of equal streams of one
    producer, or of nobody knows whom, a step is `not measured`. `rows` holds a row for each range
    of steps of one verdict, with how many tokens it rests on; `first` is the first step that
    differs, with the first token in it by sample and position; `text` says all of it.

    Without `attempt`, the attempts in force: of a step that a later one did again, that one's.
    """
    target = desk.finder.attempt(run, attempt)
    attempts = desk.catalogue.attempts(target.run)
    lineage = Lineage(attempts)
    ids = [int(row["attempt_id"]) for row in attempts if attempt in (None, row["number"])]
    steps: dict[int, Row] = {}
    seen: set[int] = set()
    # The newest attempt of a step comes first; what it did again counts there only.
    for row in desk.catalogue.step_metrics(ids, version=VERSION, numbers=None):
        step = int(row["step"])
        again = step in seen or (attempt is None and lineage.superseded_by(row) is not None)
        if again:
            continue
        seen.add(step)
        if row["has_whole"]:
            steps[step] = row
    judged = [_judge(desk, lineage, steps[step]) for step in sorted(steps)]
    rows = list(_ranges(judged))
    differing = next((each.step for each in judged if each.verdict == DIFFERS), None)
    first = None
    if differing is not None:
        row = steps[differing]
        measured = desk.measures.of(int(row["attempt_id"]), row)
        number = lineage.numbers[row["attempt_id"]]
        processes = desk.catalogue.processes(int(row["attempt_id"]))
        first = {**_first(differing, measured, processes), "attempt": number}
    said = {"attempt": attempt, "text": _text(rows, first), "first": first}
    return Answer({**target.heading(), **said, "rows": rows, "next": None})


def _judge(desk: Desk, lineage: Lineage, row: Row) -> _Judged:
    """Judge a step by the counts stored of it; where an earlier release stored it, anew."""
    tokens, masked, unequal = (row[f"{name}tokens"] for name in ("", "masked_", "unequal_"))
    verdict = row["verdict"]
    if None in (tokens, masked, unequal):
        measured = desk.measures.of(int(row["attempt_id"]), row)
        cell = measured.whole.total
        tokens, masked, unequal = cell.tokens, cell.masked, unequal_tokens(cell)
        verdict = measured.comparability.verdict
    judged = DIFFERS if unequal else EXACT if verdict == EXACT else NOT_MEASURED
    number = lineage.numbers[row["attempt_id"]]
    return _Judged(int(row["step"]), number, judged, tokens, unequal, masked - tokens)


def _ranges(judged: Sequence[_Judged]) -> Iterator[Row]:
    for (attempt, verdict), group in itertools.groupby(
        judged, key=lambda e: (e.attempt, e.verdict)
    ):
        steps = list(group)
        yield {
            "from_step": steps[0].step,
            "to_step": steps[-1].step,
            "steps": len(steps),
            "attempt": attempt,
            "verdict": verdict,
            "tokens": sum(each.tokens for each in steps),
            "unequal": sum(each.unequal for each in steps),
            "non_finite": sum(each.non_finite for each in steps),
        }


def _first(step: int, measured: Measured, processes: Sequence[Row]) -> Row:
    found = first_difference(measured.whole.summary)
    if found is None:  # the record of an older version
        return {"step": step, "text": "in a token that was not kept"}
    sender = incarnation_of(found.source)
    where: Row = next(
        ({"role": row["role"], "rank": row["rank"]}
         for row in processes if row["incarnation"] == sender), {}
    )  # fmt: skip
    return {"step": step, **found.to_json(), **where, "text": found.text(**where)}


def _text(rows: Sequence[Row], first: dict[str, Any] | None) -> str:
    if not rows:
        return "no step was measured"
    said = []
    several = len({row["attempt"] for row in rows}) > 1
    for row in rows:
        of = f" of attempt {row['attempt']}" if several else ""
        one = row["from_step"] == row["to_step"]
        steps = f"{row['from_step']}" if one else f"{row['from_step']}-{row['to_step']}"
        if row["verdict"] == DIFFERS:
            assert first is not None
            said.append(f"{row['from_step']}{of} first differs: {first['text']}")
            break
        why = f"proved on {row['tokens']} tokens" if row["verdict"] == EXACT else _why_not(row)
        said.append(f"step{'' if one else 's'} {steps}{of} {row['verdict']} ({why})")
    if first is not None:
        later = sum(row["steps"] for row in rows if row["verdict"] == DIFFERS) - 1
        total = sum(row["steps"] for row in rows if row["from_step"] > first["step"])
        within = next(row for row in rows if row["verdict"] == DIFFERS)
        total += within["steps"] - 1
        if total:
            said.append(f"of the {total} steps since then {later} differ")
    return "; ".join(said)


def _why_not(row: Row) -> str:
    if row["non_finite"]:
        return f"{row['non_finite']} tokens are finite in neither stream; the others are equal"
    return "equal, and one stream is a copy, or nobody said who computed them"
