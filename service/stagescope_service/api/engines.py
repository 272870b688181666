"""Routes about long-lived inference engines: which there are, whether they answer."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Request

from stagescope.engines.registry import ENGINE_FIELDS, check_engine
from stagescope.wire.errors import Conflict, NotFound
from stagescope_service.api.auth import caller_of
from stagescope_service.api.dependencies import Dependencies, Deps, Row
from stagescope_service.api.models import service as models
from stagescope_service.api.problems import check_ready
from stagescope_service.api.requests import Answer, PageOf, read_json

router = APIRouter(tags=["engines"])

_MOST: Final = 1000
_RUNS: Final = 200
_BODY: Final[dict[str, Any]] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["url"],
                "properties": {name: {"description": text} for name, text in ENGINE_FIELDS.items()},
                "additionalProperties": False,
            }
        }
    },
}

Name = Annotated[str, Path(max_length=100, description="The engine's name.")]
Check = Annotated[
    bool, Query(description="Ask each engine's health path now, two seconds at most.")
]


@router.get("/engines", response_model=models.Engines)
async def engines(deps: Deps, page: PageOf, check: Check = False) -> Answer:
    """List the registered engines by name, with how each answered last and how long ago.

    `used_by` names the runs that registered it as theirs or whose settings name it (`engine`: its
    name or URL). `state` is `up`, `refuses`, `unreachable` or `not asked`; with `check` the
    engines of this page are asked first.
    """
    answer = page.cut(await asyncio.to_thread(_rows, deps))
    if check:
        await deps.engine_health.ask([row["url"] for row in answer["rows"]])
    answer["rows"] = [{**row, **_health(deps, row)} for row in answer["rows"]]
    return Answer(answer)


@router.get("/engines/{name}", response_model=models.Engine)
async def engine(deps: Deps, name: Name, check: Check = False) -> Answer:
    """Return one registered engine by its name, as the list has it."""
    row = await asyncio.to_thread(_row, deps, name)
    if check:
        await deps.engine_health.ask([row["url"]])
    return Answer({**row, **_health(deps, row)})


@router.post(
    "/engines", response_model=models.RegisteredEngine, openapi_extra={"requestBody": _BODY}
)
async def add_engine(request: Request, deps: Deps) -> Answer:
    """Register an engine, or register it anew under its name; needs the operate token.

    Nothing is asked of it here. The service never sends it anything but `GET /health`, when
    somebody asks how it is; who added it is kept, also in the audit.
    """
    said = check_engine(await read_json(request, deps.settings))
    known = {row["name"] for row in await asyncio.to_thread(deps.catalogue.engines)}
    if said["name"] not in known and len(known) >= _MOST:
        raise Conflict(f"{_MOST} engines are registered", advice="remove those that are gone")
    reply = await deps.commands.add_engine(engine=said, by=str(caller_of(request)))
    return Answer(check_ready(reply))


@router.delete("/engines/{name}", response_model=models.UsedEngine)
async def remove_engine(request: Request, deps: Deps, name: Name) -> Answer:
    """Take an engine out of the registry; the engine itself is left alone. Needs operate."""
    row = await asyncio.to_thread(_row, deps, name)
    check_ready(await deps.commands.remove_engine(name=name, by=str(caller_of(request))))
    return Answer(row)


def _rows(deps: Dependencies) -> list[Row]:
    users: dict[str, list[str]] = {}
    for run in deps.catalogue.runs(limit=_RUNS):
        named = (run["settings"] or {}).get("engine")
        if isinstance(named, str):
            users.setdefault(named, []).append(run["run"])
    found = []
    for row in deps.catalogue.engines():
        own = [] if row["run"] is None else [row["run"]]
        used_by = dict.fromkeys([*own, *users.get(row["name"], ()), *users.get(row["url"], ())])
        found.append({**row, "used_by": list(used_by)})
    return found


def _row(deps: Dependencies, name: str) -> Row:
    for row in _rows(deps):
        if row["name"] == name:
            return row
    raise NotFound(f"no engine is called {name!r:.100}", advice="see GET /engines")


def _health(deps: Dependencies, row: Row) -> Row:
    known = deps.engine_health.known(row["url"])
    names = {"wall": "checked_wall", "seconds": "answered_seconds"}
    return {names.get(name, name): value for name, value in known.items()}
