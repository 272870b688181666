"""Routes about the service itself: liveness, readiness, status, audit, metrics for Prometheus."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
from typing import Final, NamedTuple

import anyio
from fastapi import APIRouter, Request, Response

from stagescope_service.core.findings import describe
from stagescope_service.http.auth import caller_of
from stagescope_service.http.parameters import Deps
from stagescope_service.http.requests import Answer, PageOf
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models import service as models
from stagescope_service.views.reading import prometheus
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_wire.errors import Forbidden, NotReady, StagescopeError
from stagescope_wire.links import Link

log = logging.getLogger(__name__)
router = APIRouter(tags=["service"])

READY_SECONDS: Final = 3.0
"""Deadline of the coordinator and of the catalogue."""


@router.get("/healthz", response_model=models.Healthy)
async def healthz() -> Answer:
    """Answer that the API's process is alive; checks nothing else and needs no token."""
    return Answer({"status": "ok", "version": _version()})


@router.get("/readyz", response_model=models.Ready)
async def readyz(deps: Deps) -> Answer:
    """Report whether the service can serve requests, else 503 with the reason; needs no token."""
    problem = await _readiness_problem(deps)
    if problem:
        # The details may name paths, and this route needs no token: they are in /status.
        wrong = f"{problem.what}: {problem.public}" if problem.public else problem.what
        raise NotReady(wrong, see=(Link("status", shows="more, with a token"),))
    return Answer({"status": "ready"})


@router.get("/status", response_model=models.Status)
async def status(deps: Deps) -> Answer:
    """Return the state of the service: ready or why not, versions, the coordinator's state."""
    problem = await _readiness_problem(deps)
    answer: JsonObject = {
        "ready": problem is None,
        "reason": None if problem is None else f"{problem.what}: {problem.why}",
        "version": _version(),
        "wall": deps.clock(),
        "data_dir": str(deps.settings.data_path),
    }
    try:
        with anyio.fail_after(READY_SECONDS):
            answer["coordinator"] = await deps.commands.status()
    except Exception as error:
        answer["coordinator"] = {"not_ready": _text(error)}
    try:
        answer["catalogue_bytes"] = await asyncio.to_thread(deps.catalogue.bytes_on_disk)
    except Exception:
        answer["catalogue_bytes"] = None
    return Answer(answer)


@router.get("/audit", response_model=models.Audit)
def audit(request: Request, deps: Deps, page: PageOf) -> Answer:
    """List who changed what, the newest first; needs the token of an admin.

    `by` names the token, what its sender calls itself, and its address. The request is in `detail`;
    webhooks of rules show only host and format.
    """
    has_tokens = request.app.state.access is not None  # else everybody here may do everything
    if has_tokens and caller_of(request).grade != "admin":
        raise Forbidden(
            "the audit says who did what in every run",
            expected="the token of an admin",
            advice="`stagescope token add NAME --role admin`, where the service's home is",
        )
    rows = deps.catalogue.audit(limit=page.limit + 1, offset=page.offset)
    return Answer(page.first_of([{**row} for row in rows]))


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def metrics(deps: Deps) -> Response:
    """Return Prometheus's text: runs, stages, lag, lost data, and the newest step's metrics."""
    sources = prometheus.Sources(
        deps.catalogue, deps.counts, deps.step_summaries, deps.settings.prometheus_runs
    )
    text = prometheus.text(sources, deps.clock())
    return Response(text, media_type=prometheus.CONTENT_TYPE)


class _Problem(NamedTuple):
    """The part of the service that is not ready, and why."""

    what: str
    why: str
    public: str = ""
    """The reason without details that not everybody may see."""


async def _readiness_problem(deps: Dependencies) -> _Problem | None:
    """Return what is not ready; None where everything is. Raises nothing, whatever fails."""
    try:
        with anyio.fail_after(READY_SECONDS):
            await asyncio.to_thread(deps.catalogue.check)
    except Exception as error:
        return _Problem("the catalogue cannot be read", _text(error))
    try:
        with anyio.fail_after(READY_SECONDS):
            reply = await deps.commands.status()
    except Exception as error:
        return _Problem("the coordinator does not answer", _text(error))
    if reply.get("not_ready"):
        public = str(reply.get("problem") or "")
        return _Problem("the coordinator is not ready", str(reply["not_ready"]), public)
    if reply.get("cluster_problem"):
        what = "the Ray cluster of the service does not answer"
        return _Problem(what, str(reply["cluster_problem"]))
    return None


def _text(error: Exception) -> str:
    """Return an error as text. Those of the service and of a deadline are expected."""
    if isinstance(error, TimeoutError):
        return str(error) or f"no answer within {READY_SECONDS:g} s"
    if not isinstance(error, StagescopeError):
        log.warning("the state of the service cannot be read", exc_info=error)
    return describe(error)


def _version() -> str:
    try:
        return importlib.metadata.version("stagescope")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
