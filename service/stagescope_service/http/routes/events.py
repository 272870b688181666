"""Routes of processes without Ray: their events, their polls, and the end of a run."""

from __future__ import annotations

import asyncio
import functools
from typing import Final

from fastapi import APIRouter, Request

from stagescope_service.coordinator.answers import Drained, News, RecordedBatch
from stagescope_service.http import framing
from stagescope_service.http.parameters import Deps
from stagescope_service.http.problems import check_ready
from stagescope_service.http.requests import Answer, BodyReaders, read_body, read_json
from stagescope_service.views.models.bodies import (
    MAX_DRAIN,
    MAX_POLL,
    DrainRequest,
    EventsRequest,
    PollRequest,
    Schema,
)
from stagescope_wire.errors import InvalidInput
from stagescope_wire.names import normal_run_name
from stagescope_wire.schema import Sender

router = APIRouter()

_BINARY: Final[Schema] = {"type": "string", "format": "binary"}
_EVENTS_BODY: Final[Schema] = {
    "required": True,
    "content": {
        framing.MEDIA_TYPE: {"schema": _BINARY},
        "application/json": {"schema": EventsRequest.schema_of_fields(closed=False)},
    },
}


@router.post(
    "/events",
    response_model=RecordedBatch,
    tags=["processes"],
    openapi_extra={"requestBody": _EVENTS_BODY},
)
async def events(request: Request, deps: Deps) -> Answer:
    """Record a batch of events, with payloads, of a process without Ray; needs the operate token.

    `application/vnd.stagescope.events`: 8 bytes of length (little-endian), that much JSON
    `{"sender", "events", "payloads": {seq: {"tensors": {name: {"dtype", "shape", "offsets"}},
    "strings", "meta"}}}`, then safetensors with entries `{seq}/{name}` and `{seq}/{name}/offsets`.
    `application/json`: the JSON alone, for events without tensors. The answer comes after the
    commit: `{"coordinator", "wall", "received", "refused", "receipts",
    "revision"}`. It has `refused_in_part` where a part of an event was refused, `plan` where the
    sender has another revision, and `pause` while the service is behind. A batch may be sent again:
    nothing counts twice.
    """
    framed = _is_framed(request)
    settings = deps.settings
    state = request.app.state
    readers: BodyReaders = state.bodies
    async with readers.for_request(request).read(request, limit=settings.max_body_bytes) as body:
        parse = functools.partial(
            framing.parse,
            body,
            framed=framed,
            max_json=settings.max_json_bytes,
            max_events=settings.max_events,
        )
        # Read before the slot is taken: a sender that stalls holds none.
        async with state.event_slots:
            batch = await asyncio.get_running_loop().run_in_executor(state.event_threads, parse)
            reply = await deps.commands.record_events(
                sender=batch.sender, events=batch.events, payloads=batch.payloads or None
            )
    return Answer(check_ready(reply))


@router.post(
    "/poll",
    response_model=News,
    tags=["processes"],
    openapi_extra=PollRequest.document(closed=False),
)
async def poll(request: Request, deps: Deps) -> Answer:
    """Renew a process's lease and wait for changes of the plan or receipts; needs operate.

    It returns after `wait` seconds (20 at most), or as soon as the plan's revision differs from
    `revision` or a payload of `unreceipted` is settled. The answer is `{"coordinator", "wall",
    "revision", "plan", "receipts", "poll_seconds"}`; `plan` is null where nothing changed.
    """
    fields = await read_json(request, deps.settings)
    Sender.parse(fields.get("sender"))  # its errors have a code of their own
    body = PollRequest.parse(fields)
    reply = await deps.commands.poll(
        sender=tuple(body.sender),
        revision=body.revision,
        unreceipted=body.unreceipted,
        wait=min(body.wait, MAX_POLL, deps.settings.poll_seconds),
    )
    answer = check_ready(reply)
    if deps.settings.public_url is None:  # the caller knows an address that works where it is
        answer = {name: value for name, value in answer.items() if name != "page"}
    return Answer(answer)


@router.post(
    "/drain",
    response_model=Drained,
    tags=["processes"],
    openapi_extra=DrainRequest.document(closed=False),
)
async def drain(request: Request, deps: Deps) -> Answer:
    """Wait until all payloads of `run` (null: every run) are read; needs operate.

    It returns after `timeout` seconds (5 at most). With `attempt_key` it ends those attempts: it
    asks the processes to finish and waits. Ranks that never reported or did not answer are in
    `missing`. If the run, or an attempt of that key, ever reported, `known` is true.
    """
    body = await read_body(request, deps.settings, DrainRequest)
    key = body.attempt_key
    if key is not None and not key.isprintable():
        raise InvalidInput(f"attempt_key is {key!r:.100}", expected="a name")
    reply = await deps.commands.drain(
        run=None if body.run is None else normal_run_name(body.run),
        timeout=min(body.timeout, MAX_DRAIN),
        attempt_key=key,
        ended_by=body.ended_by,
    )
    return Answer(check_ready(reply))


def _is_framed(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (framing.MEDIA_TYPE, "application/json"):
        raise InvalidInput(
            f"content type {kind!r:.100}", expected=f"{framing.MEDIA_TYPE} or application/json"
        )
    return kind == framing.MEDIA_TYPE
