"""The parts of a request that routes share: its body, its page of a list, checks of its query.

Bodies are read within bounds of time and memory. A sender that stalls costs a connection and the
bytes that it sent; it holds no slot, no thread and no memory that faster senders need.

Dependencies that read nothing are `async`, because a plain function would wait for a thread. While
slow requests occupy all threads, events would have to wait for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncIterator
from typing import Annotated, Final, TypeVar, get_args, get_origin

import anyio
from fastapi import Depends, Query, Request
from fastapi._compat import ModelField
from fastapi.dependencies.models import Dependant
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import Message

from stagescope_service.http.access_tokens import Grade
from stagescope_service.http.auth import caller_of
from stagescope_service.settings import Settings
from stagescope_service.views.encoding import JsonObject, decode, encode
from stagescope_service.views.models.bodies import RequestBody
from stagescope_service.views.pages import Page, parse_cursor
from stagescope_wire.errors import InvalidInput, NotReady, TooLarge


class Answer(JSONResponse):
    """JSON in which a non-finite number is the string "nan", "inf" or "-inf".

    FastAPI sends it as it is: the `response_model` of a route only describes it in the document.
    """

    def render(self, content: object) -> bytes:
        """Return the body."""
        return encode(content)


def as_json(body: bytes) -> Response:
    """Return a body that is JSON already as an answer."""
    return Response(body, media_type="application/json")


# --- bodies ---------------------------------------------------------------------------------
_GRACE_SECONDS: Final = 1.0
"""A younger body is not dropped for others: its rate is not known yet."""


@dataclasses.dataclass(eq=False, slots=True)
class _Body:
    """A body that is arriving or in use."""

    began: float
    """Monotonic seconds."""
    data: bytearray = dataclasses.field(default_factory=bytearray)
    arriving: anyio.CancelScope | None = None
    """Scope of the wait for its next bytes."""
    dropped: bool = False

    def rate(self, now: float) -> float:
        """Return its bytes per second so far; infinity while it is too young to tell."""
        age = now - self.began
        return len(self.data) / age if age >= _GRACE_SECONDS else math.inf


class BodyReader:
    """Reads bodies within one bound of memory; not thread-safe: for the server's event loop.

    Args:
        memory: most bytes of all bodies together, from their arrival to the end of their use.
        seconds: length of the window in which a body must bring `seconds * rate` bytes.
        rate: bytes per second.
    """

    def __init__(self, *, memory: int, seconds: float, rate: float) -> None:
        self.memory = memory
        self.seconds = seconds
        self.rate = rate
        self._held = 0
        self._bodies: set[_Body] = set()

    @property
    def held(self) -> int:
        """Bytes of bodies that are in memory."""
        return self._held

    @contextlib.asynccontextmanager
    async def read(self, request: Request, *, limit: int) -> AsyncIterator[bytes]:
        """Read a body; its memory is released when the context ends.

        Raises:
            TooLarge: more than `limit` bytes.
            NotReady: it stalled, or there is no memory for it now; the sender may retry.
            ClientDisconnect: the sender has gone.
        """
        body = _Body(time.monotonic())
        self._bodies.add(body)
        try:
            await self._fill(body, request, limit)
            yield bytes(body.data)
        finally:
            self._bodies.discard(body)
            self._held -= len(body.data)

    async def _fill(self, body: _Body, request: Request, limit: int) -> None:
        window, arrived = time.monotonic(), 0
        while True:
            message: Message | None = None
            with anyio.move_on_after(window + self.seconds - time.monotonic()) as scope:
                body.arriving = scope
                message = await request.receive()
            body.arriving = None
            if body.dropped:
                raise NotReady(
                    "the body came slowly, and faster ones needed its memory",
                    advice="send the same again",
                )
            if message is not None:
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                piece = message.get("body", b"")
                arrived += len(piece)
                self._append(body, piece, limit)
                if not message.get("more_body", False):
                    return
            if time.monotonic() >= window + self.seconds:
                if arrived < self.seconds * self.rate:
                    raise NotReady(
                        f"the body stalled: {arrived} bytes in {self.seconds:g} s",
                        expected=f"{self.rate:g} bytes per second",
                        advice="send the same again, or raise STAGESCOPE_BODY_SECONDS",
                    )
                window, arrived = time.monotonic(), 0

    def _append(self, body: _Body, piece: bytes, limit: int) -> None:
        if len(body.data) + len(piece) > limit:
            raise TooLarge(
                f"a body of more than {limit} bytes",
                expected=f"at most {limit} bytes",
                advice="send less at once, or raise STAGESCOPE_MAX_BODY_BYTES",
            )
        while self._held + len(piece) > self.memory:
            self._drop_slowest(body)
        body.data += piece
        self._held += len(piece)

    def _drop_slowest(self, needing: _Body) -> None:
        """Release the memory of the slowest arriving body for `needing`.

        Raises:
            NotReady: `needing` is the slowest itself.
        """
        now = time.monotonic()
        arriving = [body for body in self._bodies if body.arriving is not None and body.data]
        slowest = min(arriving, key=lambda body: body.rate(now), default=needing)
        if slowest.rate(now) >= needing.rate(now):
            raise NotReady(
                f"bodies of other requests hold {self._held} bytes",
                expected=f"at most {self.memory} bytes at a time",
                advice="send the same again in a moment",
            )
        slowest.dropped = True
        self._held -= len(slowest.data)
        slowest.data.clear()
        assert slowest.arriving is not None
        slowest.arriving.cancel()
        slowest.arriving = None


class BodyReaders:
    """One `BodyReader` for each grade of token: readers cannot use up the memory of ranks."""

    def __init__(self, settings: Settings) -> None:
        memory: dict[Grade, int] = {
            "operate": settings.max_bodies * settings.max_body_bytes,
            "read": settings.max_bodies * settings.max_json_bytes,
        }
        self._readers = {
            grade: BodyReader(memory=size, seconds=settings.body_seconds, rate=settings.body_rate)
            for grade, size in memory.items()
        }

    def for_request(self, request: Request) -> BodyReader:
        """Return the reader for the token that `request` carries."""
        return self._readers[
            "operate" if caller_of(request).grade in ("operate", "admin") else "read"
        ]


async def read_json(
    request: Request, settings: Settings, *, limit: int | None = None
) -> JsonObject:
    """Return a request's body, a JSON object.

    Args:
        request: the request.
        settings: the service's.
        limit: most bytes; None: what the settings allow.

    Raises:
        TooLarge: more bytes than that.
        NotReady: it did not arrive in time.
        InvalidInput: it is no JSON object.
    """
    readers: BodyReaders = request.app.state.bodies
    limit = settings.max_json_bytes if limit is None else limit
    async with readers.for_request(request).read(request, limit=limit) as text:
        value = decode(text)
    if not isinstance(value, dict):
        raise InvalidInput(f"the body is a {type(value).__name__}", expected="a JSON object")
    return value


Body = TypeVar("Body", bound=RequestBody)


async def read_body(request: Request, settings: Settings, model: type[Body]) -> Body:
    """Return a request's body as `model`.

    Raises:
        TooLarge, NotReady: see `read_json`.
        InvalidInput: it does not fit the model.
    """
    return model.parse(await read_json(request, settings))


# --- queries --------------------------------------------------------------------------------
async def check_query(request: Request) -> None:
    """Refuse query parameters that the route does not have: a misspelled filter filters nothing.

    Raises:
        InvalidInput: an unknown parameter, or one that is given twice.
    """
    route = request.scope.get("route")
    if not isinstance(route, APIRoute):
        return
    fields = query_fields(route.dependant)
    names = {field.alias for field in fields}
    unknown = sorted(set(request.query_params) - names)
    if unknown:
        raise InvalidInput(
            f"unknown query parameter {', '.join(name[:50] for name in unknown[:5])}",
            expected=f"one of {', '.join(sorted(names))}" if names else "none",
        )
    for field in fields:
        several = len(request.query_params.getlist(field.alias)) > 1
        if several and not is_repeatable(field):
            raise InvalidInput(f"query parameter {field.alias} is given twice", expected="it once")


def query_fields(dependant: Dependant) -> list[ModelField]:
    """Return the query parameters of a route and of its dependencies, each once."""
    fields = {field.alias: field for field in dependant.query_params}
    for each in dependant.dependencies:
        fields |= {field.alias: field for field in query_fields(each)}
    return list(fields.values())


def is_repeatable(field: ModelField) -> bool:
    """Return whether a query parameter is a list, and may be given several times."""
    annotation = field.field_info.annotation
    return any(get_origin(each) is list for each in (annotation, *get_args(annotation)))


def pattern(text: str) -> dict[str, str]:
    """Return the regular expression of a parameter for the document; routes check it themselves."""
    return {"pattern": text}


async def page_of(
    request: Request,
    limit: Annotated[
        int | None, Query(ge=1, description="Most rows; the service has a default and a maximum.")
    ] = None,
    cursor: Annotated[
        str | None, Query(max_length=100, description="The `next` of the page before.")
    ] = None,
) -> Page:
    """Return the page that `limit` and `cursor` of a query describe.

    Raises:
        InvalidInput: more rows than the service gives, or a cursor that it did not make.
    """
    settings: Settings = request.app.state.settings
    rows = limit or settings.page_size
    if rows > settings.max_page_size:
        raise InvalidInput(f"limit is {limit}", expected=f"at most {settings.max_page_size}")
    return Page(rows, () if cursor is None else parse_cursor(cursor))


PageOf = Annotated[Page, Depends(page_of)]
