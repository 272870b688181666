"""Routes about the service itself: alive, ready, status, and Prometheus."""

from __future__ import annotations

import asyncio
import importlib.metadata
from typing import Any, Final

import anyio
from fastapi import APIRouter, Response

from stagescope.wire.errors import NotReady, StagescopeError
from stagescope_service.api import prometheus
from stagescope_service.api.dependencies import Dependencies, Deps
from stagescope_service.api.models import service as models
from stagescope_service.api.requests import Answer

router = APIRouter(tags=["service"])

READY_SECONDS: Final = 3.0
"""A coordinator that has not answered by then is not ready."""


@router.get("/healthz", response_model=models.Healthy)
async def healthz() -> Answer:
    """Say that the API's process lives; asks nobody else and needs no token."""
    return Answer({"status": "ok", "version": _version()})


@router.get("/readyz", response_model=models.Ready)
async def readyz(deps: Deps) -> Answer:
    """Say whether questions and events can be answered, 503 with the reason else; no token."""
    reason = await _not_ready(deps)
    if reason:
        # What is wrong in the catalogue may name paths, and this answers anybody: see /status.
        raise NotReady(reason[0], advice="/status says more, with a token")
    return Answer({"status": "ready"})


@router.get("/status", response_model=models.Status)
async def status(deps: Deps) -> Answer:
    """Say how the service is: ready or why not, versions, the coordinator's own state."""
    reason = await _not_ready(deps)
    said: dict[str, Any] = {
        "ready": reason is None,
        "reason": None if reason is None else f"{reason[0]}: {reason[1]}",
        "version": _version(),
        "wall": deps.clock(),
    }
    try:
        with anyio.fail_after(READY_SECONDS):
            said["coordinator"] = await deps.commands.status()
    except (StagescopeError, TimeoutError) as error:
        said["coordinator"] = {"not_ready": _text(error)}
    said["data_dir"] = str(deps.settings.data_path)
    try:
        said["catalogue_bytes"] = await asyncio.to_thread(deps.catalogue.bytes_on_disk)
    except (StagescopeError, OSError):
        said["catalogue_bytes"] = None
    return Answer(said)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def metrics(deps: Deps) -> Response:
    """Return Prometheus's text: runs, stages, lag, losses, and the latest step's main metrics."""
    text = prometheus.text(deps.catalogue, deps.counts, deps.measures, deps.settings, deps.clock())
    return Response(text, media_type=prometheus.CONTENT_TYPE)


async def _not_ready(deps: Dependencies) -> tuple[str, str] | None:
    """Return what is not ready and why, or None."""
    try:
        with anyio.fail_after(READY_SECONDS):
            await asyncio.to_thread(deps.catalogue.check)
    except (StagescopeError, TimeoutError) as error:
        return "the catalogue cannot be read", _text(error)
    try:
        with anyio.fail_after(READY_SECONDS):
            reply = await deps.commands.status()
    except (StagescopeError, TimeoutError) as error:
        return "the coordinator does not answer", _text(error)
    if reply.get("not_ready"):
        return "the coordinator is not ready", str(reply["not_ready"])
    return None


def _text(error: BaseException) -> str:
    return str(error) or f"no answer within {READY_SECONDS:g} s"


def _version() -> str:
    try:
        return importlib.metadata.version("stagescope")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
