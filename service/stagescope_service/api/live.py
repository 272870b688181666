"""Routes that reach the engine: events and polls of processes without Ray."""

from __future__ import annotations

import asyncio
import functools
from typing import Any, Final

from fastapi import APIRouter, Request

from stagescope.wire.errors import InvalidInput
from stagescope.wire.schema import Sender, check_run_name
from stagescope_service.api import framing
from stagescope_service.api.dependencies import Deps
from stagescope_service.api.models import service as models
from stagescope_service.api.problems import check_ready
from stagescope_service.api.requests import Answer, read_json

router = APIRouter()

MAX_WAIT: Final = 20.0
MAX_UNRECEIPTED: Final = 100_000
MAX_DRAIN: Final = 5.0

_BINARY: Final[dict[str, Any]] = {"type": "string", "format": "binary"}
_EVENTS_BODY: Final[dict[str, Any]] = {
    "required": True,
    "content": {
        framing.MEDIA_TYPE: {"schema": _BINARY},
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["sender", "events"],
                "properties": {
                    "sender": {"type": "array", "items": {}},
                    "events": {"type": "array", "items": {"type": "array", "items": {}}},
                    "payloads": {"type": "object"},
                },
            }
        },
    },
}
_POLL_BODY: Final[dict[str, Any]] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["sender"],
                "properties": {
                    "sender": {"type": "array", "items": {}},
                    "revision": {"type": "integer", "default": -1},
                    "unreceipted": {"type": "array", "items": {"type": "integer"}},
                    "wait": {"type": "number", "minimum": 0, "maximum": MAX_WAIT},
                },
            }
        }
    },
}
_DRAIN_BODY: Final[dict[str, Any]] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["run"],
                "properties": {
                    "run": {"type": ["string", "null"]},
                    "timeout": {"type": "number", "minimum": 0, "maximum": MAX_DRAIN},
                    "attempt_key": {"type": ["string", "null"], "minLength": 1, "maxLength": 500},
                },
            }
        }
    },
}


@router.post(
    "/events",
    response_model=models.Taken,
    tags=["processes"],
    openapi_extra={"requestBody": _EVENTS_BODY},
)
async def events(request: Request, deps: Deps) -> Answer:
    """Take in a batch of events, with payloads, of a process without Ray; needs the operate token.

    `application/vnd.stagescope.events`: 8 bytes of length (little-endian), that much JSON
    `{"sender", "events", "payloads": {seq: {"tensors": {name: {"dtype", "shape", "offsets"}},
    "strings", "meta"}}}`, then safetensors with entries `{seq}/{name}` and
    `{seq}/{name}/offsets`. `application/json`: the JSON alone, for events without tensors.
    Answers after the commit: `{"coordinator", "wall", "received", "refused", "receipts",
    "revision"}`, with `refused_in_part` where something of an event was not taken. A batch may be
    sent again: nothing counts twice.
    """
    framed = _is_framed(request)
    settings = deps.settings
    state = request.app.state
    async with state.bodies.of(request).read(request, limit=settings.max_body_bytes) as body:
        read = functools.partial(
            framing.parse,
            body,
            framed=framed,
            max_json=settings.max_json_bytes,
            max_events=settings.max_events,
        )
        # Read first, then a slot: a sender that stands still holds none.
        async with state.slots:
            batch = await asyncio.get_running_loop().run_in_executor(state.readers, read)
            reply = await deps.commands.record_events(
                sender=batch.sender, events=batch.events, payloads=batch.payloads or None
            )
    return Answer(check_ready(reply))


@router.post(
    "/poll",
    response_model=models.News,
    tags=["processes"],
    openapi_extra={"requestBody": _POLL_BODY},
)
async def poll(request: Request, deps: Deps) -> Answer:
    """Renew a process's lease and wait for news of the plan or of receipts; needs operate.

    Ends after `wait` seconds (20 at most), or as soon as the plan's revision differs from
    `revision` or a payload of `unreceipted` is settled: `{"coordinator", "wall", "revision",
    "plan", "receipts", "poll_seconds"}`; `plan` is null where nothing changed.
    """
    said = await read_json(request, deps.settings)
    unknown = sorted(set(said) - {"sender", "revision", "unreceipted", "wait"})
    if unknown:
        raise InvalidInput(
            f"a poll has no field {', '.join(map(repr, unknown[:5]))}",
            expected="sender, revision, unreceipted, wait",
        )
    Sender.parse(said.get("sender"))
    reply = await deps.commands.poll(
        sender=tuple(said["sender"]),
        revision=_integer(said.get("revision", -1), "revision"),
        unreceipted=_integers(said.get("unreceipted", [])),
        wait=min(
            _seconds(said.get("wait", MAX_WAIT), "wait"), MAX_WAIT, deps.settings.poll_seconds
        ),
    )
    return Answer(check_ready(reply))


@router.post(
    "/drain",
    response_model=models.Drained,
    tags=["processes"],
    openapi_extra={"requestBody": _DRAIN_BODY},
)
async def drain(request: Request, deps: Deps) -> Answer:
    """Wait until nothing of `run` (null: of any) is still to be read; needs operate.

    Ends after `timeout` seconds (5 at most). With `attempt_key` that start of a training is over:
    its processes are asked to take leave, and waited for; `missing` names ranks that never came or
    did not answer. `known` is whether anything of the run, or of that start, ever came.
    """
    said = await read_json(request, deps.settings)
    unknown = sorted(set(said) - {"run", "timeout", "attempt_key"})
    if unknown or "run" not in said:
        wrong = f"a drain has the fields {sorted(said)!r:.200}"
        raise InvalidInput(wrong, expected="run, timeout, attempt_key")
    run, key = said["run"], said.get("attempt_key")
    if key is not None and not (isinstance(key, str) and 0 < len(key) <= 500 and key.isprintable()):
        raise InvalidInput(f"attempt_key is {key!r:.100}", expected="a name")
    reply = await deps.commands.drain(
        run=None if run is None else check_run_name(run),
        timeout=min(_seconds(said.get("timeout", MAX_DRAIN), "timeout"), MAX_DRAIN),
        attempt_key=key,
    )
    return Answer(check_ready(reply))


def _is_framed(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (framing.MEDIA_TYPE, "application/json"):
        raise InvalidInput(
            f"content type {kind!r:.100}", expected=f"{framing.MEDIA_TYPE} or application/json"
        )
    return kind == framing.MEDIA_TYPE


def _integer(value: Any, name: str) -> int:
    if type(value) is not int:
        raise InvalidInput(f"{name} is {value!r:.100}", expected="an integer")
    return value


def _integers(value: Any) -> list[int]:
    if not isinstance(value, list) or len(value) > MAX_UNRECEIPTED:
        raise InvalidInput(
            f"unreceipted is {value!r:.100}", expected=f"a list of at most {MAX_UNRECEIPTED} seq"
        )
    return [_integer(item, "a seq of unreceipted") for item in value]


def _seconds(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise InvalidInput(f"{name} is {value!r:.100}", expected="seconds from 0")
    return float(value)
