"""Webhooks of triggers: a POST of JSON in the background, with a time limit, tried a few times.

A webhook's URL holds its secret, so it goes into no log, answer or finding: only its host does.
No Ray in here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import httpx

from stagescope import nonfinite

SECONDS: Final = 10.0
"""Time limit of one try, from the connection to the answer's head."""
_AT_ONE_TIME: Final = 4


class Webhooks:
    """Calls webhooks; used from one event loop.

    Args:
        seconds: time limit of one try.
        pauses: seconds before each further try.
    """

    def __init__(self, *, seconds: float = SECONDS, pauses: tuple[float, ...] = (1.0, 5.0)) -> None:
        self._seconds = seconds
        self._pauses = pauses
        self._room = asyncio.Semaphore(_AT_ONE_TIME)

    async def call(self, url: str, body: Mapping[str, Any]) -> str:
        """Post a body; return why it did not arrive, empty where it did.

        It arrived when the answer's status is 2xx. Redirects are not followed: they would carry
        the body to another host than the one that was given. A client error (4xx) is not tried
        again, but for 408 and 429.
        """
        content = nonfinite.dumps(body).encode()
        async with self._room:
            reason, final = await self._try(url, content)
            tries = 1
            for pause in self._pauses:
                if not reason or final:
                    break
                await asyncio.sleep(pause)
                reason, final = await self._try(url, content)
                tries += 1
        return f"{reason} ({tries} {'try' if tries == 1 else 'tries'})" if reason else ""

    async def _try(self, url: str, content: bytes) -> tuple[str, bool]:
        """Return why a try failed (empty: it did not), and whether no further one can do better."""
        try:
            status = await asyncio.wait_for(self._post(url, content), self._seconds)
        except asyncio.TimeoutError:
            return f"no answer in {self._seconds:g} s", False
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            # By its kind alone: the text of an error may hold the URL.
            return f"it cannot be reached: {type(error).__name__}", False
        if 200 <= status < 300:
            return "", True
        return f"it answered {status}", status < 500 and status not in (408, 429)

    async def _post(self, url: str, content: bytes) -> int:
        # A transport and not a client, which logs the URL of each request. Its TLS context takes
        # too long to make for an event loop that ranks wait for.
        transport = await asyncio.to_thread(httpx.AsyncHTTPTransport)
        timeout = httpx.Timeout(self._seconds).as_dict()
        headers = {"content-type": "application/json", "user-agent": "stagescope"}
        request = httpx.Request(
            "POST", url, content=content, headers=headers, extensions={"timeout": timeout}
        )
        async with transport:
            response = await transport.handle_async_request(request)
            await response.aclose()
            return response.status_code
