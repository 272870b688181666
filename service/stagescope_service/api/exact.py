"""Zero as proof over a run: which steps are exact, and where the streams first differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from fastapi import APIRouter

from stagescope_service.api.dependencies import AttemptNumber, Dependencies, Deps, Row, Run
from stagescope_service.api.models import runs as models
from stagescope_service.api.requests import Answer
from stagescope_service.api.rows import Lineage
from stagescope_service.api.step_summaries import MeasuredStep
from stagescope_service.statistics.exact import NOT_KEPT, first_difference, unequal_tokens
from stagescope_service.statistics.step_metrics import VERSION
from stagescope_service.store.parts import incarnation_of

router = APIRouter(tags=["runs"])

EXACT: Final = "exact"
DIFFERS: Final = "differs"
NOT_MEASURED: Final = "not measured"

_COPY: Final = "equal, and one stream is a copy, or nobody said who computed them"
_EMPTY: Final = "no token counts"
_ODD: Final = "the others are equal"
_SUSPECT: Final = "equal, and suspect: what the metrics of a step say of comparability tells why"


class _Judged(NamedTuple):
    step: int
    attempt: int
    verdict: str
    tokens: int
    unequal: int
    non_finite: int
    why: str | None
    """Why it is not measured, one of the above."""


@router.get("/exact", response_model=models.Exact)
def exact(deps: Deps, run: Run = None, attempt: AttemptNumber = None) -> Answer:
    """Say in which steps trainer and rollout agree in every bit, and where they first do not.

    `exact` needs streams of two producers that are equal in all tokens; of equal streams of one
    producer, or of nobody knows whom, a step is `not measured`. `rows` holds a row for each range
    of steps of one verdict (and one `reason`), with how many tokens it rests on; `first` is the
    first step that differs, with the first token in it by sample and position, as far as those
    that are not finite were kept (`is_first`); `text` says all of it.

    Without `attempt`, the attempts in force: of a step that a later one did again, that one's.
    """
    target = deps.finder.attempt(run, attempt)
    attempts = deps.catalogue.attempts(target.run)
    lineage = Lineage(attempts)
    ids = [int(row["attempt_id"]) for row in attempts if attempt in (None, row["number"])]
    steps: dict[int, Row] = {}
    seen: set[int] = set()
    # The newest attempt of a step comes first; what it did again counts there only.
    for row in deps.catalogue.step_metrics(ids, version=VERSION, numbers=None):
        step = int(row["step"])
        again = step in seen or (attempt is None and lineage.superseded_by(row) is not None)
        if again:
            continue
        seen.add(step)
        if row["has_whole"]:
            steps[step] = row
    judged = [_judge(deps, lineage, steps[step]) for step in sorted(steps)]
    rows = list(_ranges(judged))
    differing = next((each.step for each in judged if each.verdict == DIFFERS), None)
    first = None
    if differing is not None:
        row = steps[differing]
        measured = deps.measures.of(int(row["attempt_id"]), row)
        number = lineage.numbers[row["attempt_id"]]
        processes = deps.catalogue.processes(int(row["attempt_id"]))
        first = {**_first(differing, measured, processes), "attempt": number}
    said = {"attempt": attempt, "text": _text(rows, first), "first": first}
    return Answer({**target.heading(), **said, "rows": rows, "next": None})


def _judge(deps: Dependencies, lineage: Lineage, row: Row) -> _Judged:
    """Judge a step by the counts stored of it; where an earlier release stored it, anew."""
    tokens, masked, unequal = (row[f"{name}tokens"] for name in ("", "masked_", "unequal_"))
    verdict = row["verdict"]
    if None in (tokens, masked, unequal):
        measured = deps.measures.of(int(row["attempt_id"]), row)
        cell = measured.whole.total
        tokens, masked, unequal = cell.tokens, cell.masked, unequal_tokens(cell)
        verdict = measured.comparability.verdict
    judged = DIFFERS if unequal else EXACT if verdict == EXACT else NOT_MEASURED
    odd, number = masked - tokens, lineage.numbers[row["attempt_id"]]
    why = _why_not(verdict, tokens, odd) if judged == NOT_MEASURED else None
    return _Judged(int(row["step"]), number, judged, tokens, unequal, odd, why)


def _why_not(verdict: str, tokens: int, non_finite: int) -> str:
    """Say why a step of no unequal token proves nothing, given its stored verdict."""
    if not tokens:
        return _EMPTY
    if verdict == NOT_MEASURED:
        return _COPY
    return _ODD if non_finite else _SUSPECT


def _ranges(judged: Sequence[_Judged]) -> Iterator[Row]:
    for (attempt, verdict, why), group in itertools.groupby(
        judged, key=lambda e: (e.attempt, e.verdict, e.why)
    ):
        steps = list(group)
        odd = sum(each.non_finite for each in steps)
        yield {
            "from_step": steps[0].step,
            "to_step": steps[-1].step,
            "steps": len(steps),
            "attempt": attempt,
            "verdict": verdict,
            "tokens": sum(each.tokens for each in steps),
            "unequal": sum(each.unequal for each in steps),
            "non_finite": odd,
            "reason": None if why is None else _reason(why, odd),
        }


def _reason(why: str, non_finite: int) -> str:
    if not non_finite:
        return why
    many = "1 token is" if non_finite == 1 else f"{non_finite} tokens are"
    neither = f"{many} finite in neither stream"
    return f"{neither}; {why}" if why == _ODD else f"{why}; {neither}"


def _first(step: int, measured: MeasuredStep, processes: Sequence[Row]) -> Row:
    found = first_difference(measured.whole.summary)
    if found is None:
        return {"step": step, "text": NOT_KEPT}
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
        why = f"proved on {row['tokens']} tokens" if row["verdict"] == EXACT else row["reason"]
        said.append(f"step{'' if one else 's'} {steps}{of} {row['verdict']} ({why})")
    if first is not None:
        later = sum(row["steps"] for row in rows if row["verdict"] == DIFFERS) - 1
        total = sum(row["steps"] for row in rows if row["from_step"] > first["step"])
        within = next(row for row in rows if row["verdict"] == DIFFERS)
        total += within["steps"] - 1
        if total:
            said.append(f"of the {total} steps since then {later} differ")
    return "; ".join(said)
