"""What changed between two attempts before anything is measured: code, options, places."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

from fastapi import APIRouter, Query

from stagescope.targets import read_target
from stagescope.wire.errors import InvalidInput
from stagescope_service.api.dependencies import Dependencies, Deps
from stagescope_service.api.models import comparisons as models
from stagescope_service.api.requests import Answer, PageOf, pattern
from stagescope_service.api.target import Target
from stagescope_service.compare.fingerprints import Attempt, fingerprint_differences

router = APIRouter(tags=["comparison"])

_Side = Annotated[
    str,
    Query(
        max_length=200,
        description="`run[@attempt]`; default: the run's newest attempt.",
        json_schema_extra=pattern(r"^(?!\.{1,2}(@|$))[A-Za-z0-9._-]{1,100}(@[0-9]{1,9})?$"),
    ),
]


@router.get("/diff", response_model=models.Diff)
def diff(deps: Deps, a: _Side, b: _Side, page: PageOf) -> Answer:
    """List what differs between two attempts or runs, what decides numbers first.

    Their fingerprints (git, configuration, packages, drivers, environment without secrets) and
    where each rank ran. `weight` says what a difference may mean: other `numbers`, another
    `place`, or only another `start`. `unknown` names the sides without a fingerprint.
    """
    found = attempts_apart(deps, side(deps, a), side(deps, b))
    rows = found["rows"][page.offset :]
    return Answer({**found, **page.answer(rows[: page.limit], more=len(rows) > page.limit)})


def side(deps: Dependencies, text: str) -> Target:
    """Return the attempt that `run[@attempt]` names.

    Raises:
        NotFound: no such run or attempt.
        InvalidInput: it names a step too, or cannot be read.
    """
    asked = read_target(text)
    if asked.step is not None:
        raise InvalidInput(f"{text!r} names a step", expected="RUN[@ATTEMPT]")
    return deps.finder.attempt(asked.run, asked.attempt)


def attempts_apart(deps: Dependencies, a: Target, b: Target) -> dict[str, Any]:
    """Return what differs between two attempts, as the route answers."""
    sides = {"a": a, "b": b}
    told = {name: _attempt(deps, target) for name, target in sides.items()}
    rows = [each._asdict() for each in fingerprint_differences(told["a"], told["b"])]
    return {
        **{name: _heading(target) for name, target in sides.items()},
        "counts": dict(Counter(row["weight"] for row in rows)),
        "unknown": [name for name, each in told.items() if not each.fingerprint],
        "rows": rows,
    }


def _attempt(deps: Dependencies, target: Target) -> Attempt:
    processes = deps.catalogue.processes(target.attempt_id)
    return Attempt(target.attempt["fingerprint"], processes)


def _heading(target: Target) -> dict[str, Any]:
    row = target.attempt
    return {
        "run": target.run,
        "attempt": target.number,
        "begun": row["opened_wall"],
        "resumed_from_step": row["resumed_from_step"],
    }
