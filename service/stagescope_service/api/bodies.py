"""Bodies of requests: how slowly they may arrive, and how much of them is in memory at a time.

A sender that stands still costs a connection and what it sent, nothing else: no slot, no thread,
and no memory that a sender who goes on would need.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncIterator
from typing import Final

import anyio
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Message

from stagescope.wire.errors import NotReady, TooLarge
from stagescope_service.api.auth import Grade, caller_of
from stagescope_service.settings import Settings

_FAIR_SECONDS: Final = 1.0
"""A body that is younger than this is not dropped for others: its rate is not known yet."""


@dataclasses.dataclass(eq=False, slots=True)
class _Body:
    """A body that is arriving or in use."""

    began: float
    data: bytearray = dataclasses.field(default_factory=bytearray)
    arriving: anyio.CancelScope | None = None
    dropped: bool = False

    def rate(self, now: float) -> float:
        """Return the bytes per second since it began, or infinity where that is not known."""
        age = now - self.began
        return len(self.data) / age if age >= _FAIR_SECONDS else math.inf


class Bodies:
    """Reads bodies within one bound of memory; used from the server's event loop only.

    Args:
        memory: bytes of all bodies together, from their arrival until they are dealt with.
        seconds: in each such window a body must bring `seconds * rate` bytes.
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
        """Bytes that are in memory now."""
        return self._held

    @contextlib.asynccontextmanager
    async def read(self, request: Request, *, limit: int) -> AsyncIterator[bytes]:
        """Read a body; its memory is given back when the context ends.

        Raises:
            TooLarge: more than `limit` bytes.
            NotReady: it stood still, or there is no memory for it now: the same may be sent again.
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
                self._add(body, piece, limit)
                if not message.get("more_body", False):
                    return
            if time.monotonic() >= window + self.seconds:
                if arrived < self.seconds * self.rate:
                    raise NotReady(
                        f"the body stood still: {arrived} bytes in {self.seconds:g} s",
                        expected=f"{self.rate:g} bytes per second",
                        advice="send the same again, or raise STAGESCOPE_BODY_SECONDS",
                    )
                window, arrived = time.monotonic(), 0

    def _add(self, body: _Body, piece: bytes, limit: int) -> None:
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

    def _drop_slowest(self, asking: _Body) -> None:
        now = time.monotonic()
        arriving = [body for body in self._bodies if body.arriving is not None and body.data]
        slowest = min(arriving, key=lambda body: body.rate(now), default=asking)
        if slowest.rate(now) >= asking.rate(now):
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


class BodyPools:
    """One `Bodies` for each grade of token: whoever may only read crowds out no rank."""

    def __init__(self, settings: Settings) -> None:
        memory: dict[Grade, int] = {
            "operate": settings.max_bodies * settings.max_body_bytes,
            "read": settings.max_bodies * settings.max_json_bytes,
        }
        self._pools = {
            grade: Bodies(memory=size, seconds=settings.body_seconds, rate=settings.body_rate)
            for grade, size in memory.items()
        }

    def of(self, request: Request) -> Bodies:
        """Return the pool of the token that `request` carries."""
        return self._pools["operate" if caller_of(request).grade == "operate" else "read"]
