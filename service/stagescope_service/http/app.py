"""Builds the FastAPI app of the API from its dependencies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from urllib.parse import quote, urlsplit

from fastapi import Depends, FastAPI, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.responses import RedirectResponse
from starlette.routing import Route

from stagescope_service.figures import overview
from stagescope_service.figures.run_curves import CurveRequest
from stagescope_service.http import guide, page, problems, stream
from stagescope_service.http.access_token_file import TokenFile
from stagescope_service.http.access_tokens import Access, AccessTokens
from stagescope_service.http.auth import OPEN_FOLDERS, OPEN_PATHS, PREFIX, WHOAMI, Guard, check_bind
from stagescope_service.http.requests import Answer, BodyReaders, check_query
from stagescope_service.http.routes import (
    canary,
    captures,
    compared_figures,
    comparisons,
    engines,
    events,
    figures,
    findings,
    hangs,
    health,
    kept,
    numbers,
    operator_comparisons,
    operators,
    report,
    run_figures,
    runs,
    samples,
    steps,
    triggers,
    weights,
)  # fmt: skip
from stagescope_service.rules.doctor import rulebook
from stagescope_service.settings import Settings
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.views.diagnosis import start_diagnosis
from stagescope_service.views.models.comparisons import comparison_schemas
from stagescope_service.views.reading.dependencies import Commands, Dependencies
from stagescope_wire.errors import StagescopeError
from stagescope_wire.nonfinite import Json

DESCRIPTION: Final = """\
Which round, which token, which rank, which operator went wrong.

**Tokens.** `Authorization: Bearer <token>`. The role read allows GET. The role operate also
allows POST, PUT and DELETE, including `/events` and `/poll`. The role admin also allows `/audit`.
`/healthz` and `/readyz` need no token. A browser trades a token for a cookie: `POST /login`. A
token that sends more requests in a minute than it may gets 429, with `Retry-After`.

**Numbers.** A number that is not finite is the string `"nan"`, `"inf"` or `"-inf"`: JSON has no
such numbers. `null` means unknown. Times that end in `_wall` are Unix seconds of the service's
clock, durations (`seconds`) are monotonic seconds of the process.

**Which run.** Without `run` the run whose training stage began last answers; without `attempt`
its newest attempt that has the step; `attempt_key` restricts it to the attempts of that key.
Every answer names both; other live runs are listed in `also_live`. `superseded_by` marks a step
that a later attempt repeats.

**Lists** hold `rows` and `next`: give that as `cursor` for the next page, `null` ends it.

**Versions.** Every path also answers below `/v1`, as `/v1/runs`; both stay what they are while
there is a version 1. Later releases add fields to answers: pass over those that you do not know.

**Errors** are `application/problem+json` (RFC 9457) with `code`, `wrong`, `expected`, `advice`;
`see` lists the paths in `advice` as data, as it does in findings.
"""


def make_app(
    *,
    catalogue: Catalogue,
    commands: Commands,
    settings: Settings,
    tokens: AccessTokens | None,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """Return the app.

    Args:
        catalogue: the store's reading side; its owner opens and closes it.
        commands: the coordinator's methods.
        settings: limits, allowed roots, names.
        tokens: of the clients; None: every client on loopback may operate.
        clock: returns Unix seconds.

    Raises:
        Forbidden: no tokens, and a bind beyond loopback.
    """
    check_bind(settings, tokens)
    app = FastAPI(
        title="stagescope",
        description=DESCRIPTION,
        openapi_url=None,  # FastAPI would build the document on the event loop, for seconds
        docs_url=None,  # both load their scripts from elsewhere; see `page.docs`
        redoc_url=None,
        redirect_slashes=False,  # it names scheme, host and path of a request that a proxy changed
        dependencies=[Depends(check_query)],
        default_response_class=Answer,
        responses={
            "4XX": {"description": "A problem", "content": {problems.MEDIA_TYPE: _PROBLEM}},
            "5XX": {"description": "A problem", "content": {problems.MEDIA_TYPE: _PROBLEM}},
        },
        generate_unique_id_function=_operation_id,
    )
    app.state.settings = settings
    app.state.tokens = tokens
    access = None
    if tokens is not None:
        access = Access(tokens, TokenFile(settings.home, tokens.operate))
    app.state.access = access
    app.state.watcher = stream.Watcher(catalogue, clock)
    app.state.bodies = BodyReaders(settings)
    app.state.event_slots = asyncio.Semaphore(settings.max_bodies)
    # Not the shared threads: those may all wait for a hung catalogue, and events must not.
    app.state.event_threads = ThreadPoolExecutor(settings.max_bodies, "api-events")
    app.state.deps = Dependencies.build(
        catalogue=catalogue, commands=commands, settings=settings, clock=clock
    )
    app.state.readable = [
        re.sub(r":\w+}", "}", str(route.path))
        for router in _ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and "GET" in (route.methods or ())
    ]
    problems.add_handlers(app)
    for router in _ROUTERS:
        app.include_router(router, dependencies=[Depends(_BEARER)])
    app.openapi = lambda: _make_document(app)  # type: ignore[method-assign]
    app.add_route("/openapi.json", _document_route)
    app.router.routes.extend((*page.FILES, *guide.ROUTES, _SLASH))
    app.add_middleware(page.EntityTags)
    public_path = _public_path(settings)
    app.add_middleware(Guard, settings=settings, access=access, public_path=public_path)
    return app


def prepare(app: FastAPI) -> None:
    """Do once, after the start, what the first questions of a process would wait for.

    Routes are completed, Plotly's script is compressed, the doctor's rules are read. What the page
    of the newest run shows is read, so that its reader waits only for what is new. What was
    imported is kept away from the garbage collector: its search takes longer than most answers.
    A search before that would take a tenth of the start, and free 2.5 % of the objects.
    """
    for route in app.router.routes:  # FastAPI completes a route when it is first looked at
        route.matches({"type": "http", "method": "GET", "path": "", "root_path": ""})
    page.compress()
    rulebook()
    deps: Dependencies = app.state.deps
    with contextlib.suppress(StagescopeError):  # no run yet, or no catalogue
        target = deps.finder.step(None, None, None)
        deps.catalogue.runs(limit=1, name=target.run)
        overview.answer(deps, target.run, CurveRequest())
        start_diagnosis(deps, target.run, None, None)[1].result()
    gc.freeze()


_ROUTERS: Final = (
    health.router,
    runs.router,
    findings.router,
    report.router,
    steps.router,
    numbers.router,
    samples.router,
    run_figures.router,
    figures.router,
    compared_figures.router,
    operators.router,
    operator_comparisons.router,
    captures.router,
    triggers.router,
    weights.router,
    canary.router,
    engines.router,
    hangs.router,
    comparisons.router,
    kept.router,
    events.router,
    page.router,
    stream.router,
)
_PROBLEM: Final = {"schema": {"$ref": "#/components/schemas/Problem"}}

# Only for the document: the guard checks the token before a route is found.
_BEARER: Final = HTTPBearer(auto_error=False, description="A token of the service.")


def _operation_id(route: APIRoute) -> str:
    method = min(route.methods or {"get"}).lower()
    return "_".join([method, *re.findall(r"\w+", route.path)])


def _public_path(settings: Settings) -> str:
    """Return the path of the address that people open, which a proxy may leave in requests.

    It is "" if it begins as a path of the API does: then the proxy must remove it.
    """
    path = urlsplit(settings.public_url or "").path
    own = (route for router in _ROUTERS for route in router.routes)
    paths = [
        PREFIX,
        *OPEN_PATHS,
        *OPEN_FOLDERS,
        *(route.path for route in own if isinstance(route, Route)),
    ]
    return "" if path.split("/")[:2] in [each.split("/")[:2] for each in paths] else path


async def _without_slash(request: Request) -> RedirectResponse:
    """Redirect to the same path without slashes at its end, relative to the request's address."""
    path, query = request.url.path, request.url.query
    short = path.rstrip("/")
    up, name = "../" * (len(path) - len(short)), quote(short.rpartition("/")[2], safe="")
    return RedirectResponse(f"{up}{name}{query and '?'}{query}")


_SLASH: Final = Route("/{path:path}/", _without_slash, methods=["GET", "POST", "PUT", "DELETE"])
"""The last route: paths that no other has, and that end with a slash."""


async def _document_route(request: Request) -> Answer:
    return Answer(await asyncio.to_thread(request.app.openapi))


def _make_document(app: FastAPI) -> dict[str, Json]:
    """Return the OpenAPI document; FastAPI keeps it."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = FastAPI.openapi(app)
    schemas = document["components"]["schemas"]
    # Its links are among the components already: findings have them, too.
    problem = problems.Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    del problem["$defs"]
    schemas |= {"Problem": problem, **comparison_schemas()}
    for operation in (each for by in document["paths"].values() for each in by.values()):
        for parameter in operation.get("parameters", ()):
            if parameter["name"] == "limit":  # a setting, unless the route has its own bound
                for kind in parameter["schema"].get("anyOf", ()):
                    if kind["type"] == "integer":
                        kind.setdefault("maximum", app.state.settings.max_page_size)
    for path in {*OPEN_PATHS, WHOAMI} & set(document["paths"]):
        for operation in document["paths"][path].values():
            operation.pop("security", None)
    return document
