"""Whether registered engines answer: asked when somebody wants to know, with a deadline.

Asked is the health path of the stored URL and nothing else, without redirects and without any
token, and of the answer only the status is read.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import httpx

from stagescope.discovery import is_loopback
from stagescope.engines.detection import HEALTH_PATH

SECONDS: Final = 2.0
"""Deadline of one engine's answer; all are asked at one time."""
_FRESH: Final = 1.0
"""Seconds for which nobody asks again: questions of many readers are one."""
_AT_ONCE: Final = 32
_MOST: Final = 1000
"""Engines whose answers are remembered."""


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """How an engine answered: "up", "refuses" (with the status), "unreachable"."""

    state: str
    status: int | None
    reason: str
    seconds: float
    wall: float


class EngineHealth:
    """The last answers by URL."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, Health] = {}
        self._places = asyncio.Semaphore(_AT_ONCE)

    def known(self, url: str) -> dict[str, Any]:
        """Return the last answer of an engine with its age; `state` is "not asked" before."""
        found = self._known.get(url)
        if found is None:
            return {"state": "not asked"}
        age = max(self._clock() - found.wall, 0.0)
        return {**dataclasses.asdict(found), "age_seconds": age}

    async def ask(self, urls: Sequence[str]) -> None:
        """Ask every engine whose answer is not fresh; returns after the deadline at most."""
        now = self._clock()
        due = [
            url
            for url in dict.fromkeys(urls)
            if (known := self._known.get(url)) is None or not 0 <= now - known.wall < _FRESH
        ]
        await asyncio.gather(*map(self._ask, due))
        while len(self._known) > _MOST:
            self._known.pop(next(iter(self._known)))

    async def _ask(self, url: str) -> None:
        begun = time.monotonic()
        state, status, reason = "unreachable", None, ""
        try:
            # From the moment of the question: who waits for a place has waited, too.
            status = await asyncio.wait_for(self._status(url), SECONDS)
            state = "up" if 200 <= status < 300 else "refuses"
            reason = "" if state == "up" else f"{HEALTH_PATH} answers {status}"
        except asyncio.TimeoutError:
            reason = f"no answer within {SECONDS:g} s"
        except (httpx.HTTPError, OSError) as error:
            reason = (str(error) or type(error).__name__)[:200]
        seconds = time.monotonic() - begun
        self._known.pop(url, None)
        self._known[url] = Health(state, status, reason, seconds, self._clock())

    async def _status(self, url: str) -> int:
        options: Mapping[str, Any] = {
            "follow_redirects": False,
            "trust_env": not is_loopback(url),
            "timeout": SECONDS,
            # Loading the system's certificates takes 40 ms, in vain where nothing is encrypted.
            "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if url.startswith("http:") else True,
        }
        async with (
            self._places,
            httpx.AsyncClient(**options) as client,
            client.stream("GET", url + HEALTH_PATH) as response,
        ):
            return response.status_code
