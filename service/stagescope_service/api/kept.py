"""Routes about kept files: what is kept of a step, where it lies, and the pin that lets it stay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request

from stagescope.wire.errors import InvalidInput, StagescopeError
from stagescope.wire.keep import SECTIONS
from stagescope_service.api import rows as shape
from stagescope_service.api.auth import caller_of
from stagescope_service.api.dependencies import (
    Dependencies,
    Deps,
    Rank,
    Role,
    Row,
    Stage,
    StepTarget,
)
from stagescope_service.api.models import steps as models
from stagescope_service.api.problems import check_ready
from stagescope_service.api.requests import Answer, PageOf

router = APIRouter(prefix="/steps/{step}", tags=["kept files"])

MOST_FILES: Final = 100_000
_SHOWN: Final = (
    "bytes", "checksum", "tensors", "policy_version", "node_id", "path", "wall", "deleted_wall",
)  # fmt: skip

Section = Annotated[
    str | None,
    Query(
        description="Only files that hold something of it.",
        json_schema_extra={"enum": [*SECTIONS]},
    ),
]


@router.get("/kept", response_model=models.Kept)
def kept(
    deps: Deps,
    target: StepTarget,
    page: PageOf,
    stage: Stage = None,
    role: Role = None,
    rank: Rank = None,
    section: Section = None,
) -> Answer:
    """List the files that are kept of the step, by stage, role, rank and part.

    `sections` says what a file holds, `tensors` gives name -> [dtype, shape, rows of a packed
    one]. `state` is `kept`, `deleted` (retention let it go), `missing` (somebody else removed it)
    or `unreachable` (its node is gone). Of a pinned step the payloads that its pin holds in the
    ring are listed, too, with the state `pinned`. `files` and `bytes` are of what is not deleted.
    """
    if section is not None and section not in SECTIONS:
        raise InvalidInput(f"section is {section!r:.100}", expected=f"one of {', '.join(SECTIONS)}")
    assert target.step is not None
    number = int(target.step["step"])
    every = deps.catalogue.artifacts(
        target.attempt_id, number, kind="kept", deleted=None, limit=MOST_FILES
    )
    if target.step["pinned"]:
        every += deps.catalogue.artifacts(target.attempt_id, number, kind="ring", limit=MOST_FILES)
    found = shape.chosen(every, f"step {number}", stage=stage, role=role, rank=rank)
    if section is not None:
        found = [row for row in found if section in (row["sections"] or {})]
    found.sort(key=_order)
    there = [row for row in found if row["deleted_wall"] is None]
    said = {
        "pinned": bool(target.step["pinned"]),
        "files": len(there),
        "bytes": sum(row["bytes"] or 0 for row in there),
    }
    answer = page.cut(found)
    states = _states(deps, answer["rows"])
    shown = [_row(row, state) for row, state in zip(answer["rows"], states, strict=True)]
    return Answer({**target.heading(), **said, **answer, "rows": shown})


@router.put("/pin", response_model=models.Pin)
async def pin(request: Request, deps: Deps, target: StepTarget) -> Answer:
    """Let the kept files and the recent payloads of a step stay until it is unpinned.

    Needs the operate token. `payloads` and `bytes` are what it holds now, files included; what
    comes later is held, too. `gone` had left the ring before; `reasons` say why something is not
    pinned (the ring's share for pins may be full).
    """
    assert target.step is not None
    reply = await deps.commands.pin(
        attempt_id=target.attempt_id, step=int(target.step["step"]), by=str(caller_of(request))
    )
    said = check_ready(reply)
    names = ("pinned", "payloads", "bytes", "gone", "reasons")
    return Answer({**target.heading(), **{name: said[name] for name in names}})


def _order(row: Row) -> tuple[object, ...]:
    place = (row["stage"] or "", row["role"] or "", row["rank"] or 0)
    return (*place, shape.part_text(row), row["wall"] or 0.0)


def _row(row: Row, state: str) -> Row:
    return {
        "stage": row["stage"],
        "role": row["role"],
        "rank": row["rank"],
        "part": shape.part_text(row),
        "sections": [*(row["sections"] or {})],
        "state": state,
        **{name: row[name] for name in _SHOWN},
    }


def _states(deps: Dependencies, rows: Sequence[Row]) -> list[str]:
    """Say of each file whether it can be read; a node that does not answer is asked once."""
    silent: set[str | None] = set()
    found = []
    for row in rows:
        if row["deleted_wall"] is not None:
            found.append("deleted")
        elif row["kind"] == "ring":
            found.append("pinned")
        elif Path(row["path"]).is_file():
            found.append("kept")
        elif row["node_id"] in silent:
            found.append("unreachable")
        else:
            state = _asked(deps, row)
            if state == "unreachable":
                silent.add(row["node_id"])
            found.append(state)
    return found


def _asked(deps: Dependencies, row: Row) -> str:
    try:
        there = {"node_id": str(row["node_id"]), "path": row["path"]}
        deps.commands.read_artifact(**there, offset=0, size=1)
    except StagescopeError as error:
        return "missing" if error.code == "not_found" else "unreachable"
    return "kept"
