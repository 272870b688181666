"""Checks the health of registered engines, on request and with a deadline.

A check requests the health path of the stored URL and nothing else, without redirects and without
a token, and reads only the status of the answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Final

from stagescope_service.views.encoding import JsonObject
from stagescope_wire import proxies
from stagescope_wire.discovery import load_httpx
from stagescope_wire.engines.registry import HEALTH_PATH
from stagescope_wire.errors import InvalidInput

load_httpx()
import httpx  # noqa: E402 - without its command line, which imports rich

DEADLINE_SECONDS: Final = 2.0
"""Seconds for one engine's answer; engines are checked concurrently."""
_FRESH_SECONDS: Final = 1.0
"""A result younger than this is reused, so that many readers cause one check."""
_MAX_CONCURRENT: Final = 32
_MAX_CACHED: Final = 1000
"""Engines whose results are kept."""


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """The result of a check: "up", "refuses" (with the status) or "unreachable"."""

    state: str
    status: int | None
    reason: str
    seconds: float
    """Seconds until the answer."""
    wall: float
    """Unix seconds of the check."""


class EngineHealth:
    """The last results by URL."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._results: dict[str, Health] = {}
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)

    def last(self, url: str) -> JsonObject:
        """Return the last result of an engine and its age; `state` is "not asked" without one."""
        result = self._results.get(url)
        if result is None:
            return {"state": "not asked"}
        age = max(self._clock() - result.wall, 0.0)
        return {
            "state": result.state,
            "status": result.status,
            "reason": result.reason,
            "answered_seconds": result.seconds,
            "checked_wall": result.wall,
            "age_seconds": age,
        }

    async def check(self, urls: Sequence[str]) -> None:
        """Check every engine whose result is not fresh; returns after the deadline at most."""
        now = self._clock()
        due = [
            url
            for url in dict.fromkeys(urls)
            if (last := self._results.get(url)) is None or not 0 <= now - last.wall < _FRESH_SECONDS
        ]
        await asyncio.gather(*map(self._check, due))
        while len(self._results) > _MAX_CACHED:
            self._results.pop(next(iter(self._results)))

    async def _check(self, url: str) -> None:
        begun = time.monotonic()
        state, status, reason = "unreachable", None, ""
        try:
            # The deadline includes the wait for a slot.
            status = await asyncio.wait_for(self._request(url), DEADLINE_SECONDS)
            state = "up" if 200 <= status < 300 else "refuses"
            reason = "" if state == "up" else f"{HEALTH_PATH} answers {status}{proxies.way_to(url)}"
        except (asyncio.TimeoutError, httpx.TimeoutException):
            reason = f"no answer within {DEADLINE_SECONDS:g} s"
        except (httpx.HTTPError, OSError, InvalidInput) as error:
            reason = proxies.reason_of(error)
        seconds = time.monotonic() - begun
        self._results.pop(url, None)
        self._results[url] = Health(state, status, reason, seconds, self._clock())

    async def _request(self, url: str) -> int:
        """Return the status of the health path."""
        async with (
            self._slots,
            httpx.AsyncClient(
                follow_redirects=False,
                transport=proxies.async_transport(url),
                trust_env=False,
                timeout=DEADLINE_SECONDS,
            ) as client,
            client.stream("GET", url + HEALTH_PATH) as response,
        ):
            return response.status_code
