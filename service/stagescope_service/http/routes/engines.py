"""Routes about long-lived inference engines: the registry, and their health."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

from fastapi import APIRouter, Path, Query, Request

from stagescope_service.http.auth import caller_of
from stagescope_service.http.parameters import Deps
from stagescope_service.http.problems import check_ready
from stagescope_service.http.requests import Answer, PageOf, read_json
from stagescope_service.store.tables import RegisteredEngine
from stagescope_service.views.models import service as models
from stagescope_service.views.models.bodies import EngineRequest
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_wire.engines.registry import check_engine
from stagescope_wire.errors import Conflict, NotFound
from stagescope_wire.links import Link

router = APIRouter(tags=["engines"])

_MAX_ENGINES: Final = 1000
_MAX_RUNS: Final = 200

Name = Annotated[str, Path(max_length=100, description="The engine's name.")]
Check = Annotated[
    bool, Query(description="Ask each engine's health path now, two seconds at most.")
]


@router.get("/engines", response_model=models.Engines)
async def engines(deps: Deps, page: PageOf, check: Check = False) -> Answer:
    """List the registered engines by name, with the last result of a health check and its age.

    Runs that registered an engine as theirs, or whose settings name it (`engine`: its name or URL),
    are in `used_by`. Each `state` is `up`, `refuses`, `unreachable` or `not asked`. With `check`
    the engines of this page are checked first.
    """
    every = await asyncio.to_thread(_engine_rows, deps)
    rows = every[page.offset : page.offset + page.limit]
    if check:
        await deps.engine_health.check([row["url"] for row in rows])
    listed = [{**row, **deps.engine_health.last(row["url"])} for row in rows]
    return Answer(page.answer(listed, more=len(every) > page.offset + page.limit))


@router.get("/engines/{name}", response_model=models.Engine)
async def engine(deps: Deps, name: Name, check: Check = False) -> Answer:
    """Return one registered engine by its name, as the list has it."""
    row = await asyncio.to_thread(_engine_row, deps, name)
    if check:
        await deps.engine_health.check([row["url"]])
    return Answer({**row, **deps.engine_health.last(row["url"])})


@router.post("/engines", response_model=RegisteredEngine, openapi_extra=EngineRequest.document())
async def add_engine(request: Request, deps: Deps) -> Answer:
    """Register an engine, or replace the one of its name; needs the operate token.

    The engine is not contacted. The service only ever sends it `GET /health`, when a client
    requests a health check. Who registered it is kept, also in the audit.
    """
    engine = check_engine(await read_json(request, deps.settings))
    names = {row["name"] for row in await asyncio.to_thread(deps.catalogue.engines)}
    if engine["name"] not in names and len(names) >= _MAX_ENGINES:
        raise Conflict(
            f"{_MAX_ENGINES} engines are registered", advice="remove those that are gone"
        )
    reply = await deps.commands.add_engine(engine=engine, by=str(caller_of(request)))
    return Answer(check_ready(reply))


@router.delete("/engines/{name}", response_model=models.UsedEngine)
async def remove_engine(request: Request, deps: Deps, name: Name) -> Answer:
    """Remove an engine from the registry; the engine itself is not contacted. Needs operate."""
    row = await asyncio.to_thread(_engine_row, deps, name)
    check_ready(await deps.commands.remove_engine(name=name, by=str(caller_of(request))))
    return Answer(row)


def _engine_rows(deps: Dependencies) -> list[models.UsedEngine]:
    """Return the registered engines, each with the runs that use it."""
    users: dict[str, list[str]] = {}
    for run in deps.catalogue.runs(limit=_MAX_RUNS):
        engine = (run["settings"] or {}).get("engine")
        if isinstance(engine, str):
            users.setdefault(engine, []).append(run["run"])
    rows: list[models.UsedEngine] = []
    for row in deps.catalogue.engines():
        own = [] if row["run"] is None else [row["run"]]
        used_by = dict.fromkeys([*own, *users.get(row["name"], ()), *users.get(row["url"], ())])
        rows.append({**row, "used_by": list(used_by)})
    return rows


def _engine_row(deps: Dependencies, name: str) -> models.UsedEngine:
    for row in _engine_rows(deps):
        if row["name"] == name:
            return row
    raise NotFound(f"no engine is called {name!r:.100}", see=(Link("engines"),))
