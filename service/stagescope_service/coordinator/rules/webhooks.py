"""Calls webhooks, and reads whether the other side accepted the message."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from collections.abc import Callable, Collection
from typing import Final

from stagescope_service.rules.messages import FiringMessage, one_line, request_of, shortened
from stagescope_service.rules.webhooks import Webhook
from stagescope_wire.discovery import load_httpx
from stagescope_wire.proxies import unused_variable

load_httpx()
import httpx  # noqa: E402 - without its command line, which imports rich

SECONDS: Final = 10.0
"""Time limit of one try, from the connection to the end of the reading of the answer."""
MAX_ANSWER: Final = 64 * 1024
"""Bytes of an answer that are read."""
_AT_ONE_TIME: Final = 4
_CODES: Final = {"feishu": ("code", "StatusCode"), "dingtalk": ("errcode",), "wecom": ("errcode",)}
"""Fields of a tool's answer that say whether it accepted the message; its status is always 200."""
_TEXTS: Final = {"feishu": "msg", "dingtalk": "errmsg", "wecom": "errmsg"}
_TEMPORARY: Final = {"feishu": (11232,), "dingtalk": (-1, 130101), "wecom": (-1, 45009)}
"""Codes that mean: busy, or too many messages."""
_SLACK_ERROR: Final = re.compile(r"[a-z_]{1,60}")


@dataclasses.dataclass(frozen=True)
class Delivery:
    """The result of sending a message.

    Attributes:
        answer: The other side's answer; empty if none.
        reason: Why the message did not arrive; empty if it did.
        final: Whether another try is pointless.
    """

    answer: str = ""
    reason: str = ""
    final: bool = False


class Webhooks:
    """Calls webhooks; used from one event loop.

    Args:
        hosts: the hosts that may be called; empty: any.
        seconds: time limit of one try.
        pauses: seconds before each further try.
        wall: Unix seconds, for signatures.
    """

    def __init__(
        self,
        *,
        hosts: Collection[str] = (),
        seconds: float = SECONDS,
        pauses: tuple[float, ...] = (1.0, 5.0),
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._hosts = frozenset(hosts)
        self._seconds = seconds
        self._pauses = pauses
        self._wall = wall
        self._room = asyncio.Semaphore(_AT_ONE_TIME)

    async def call(self, webhook: Webhook, message: FiringMessage) -> str:
        """Send a firing to a webhook; return why it did not arrive, empty if it did.

        It has arrived if the answer's status is 2xx and a chat tool's body has no error.
        Redirects are not followed: they would send the body to another host than the configured
        one. Client errors (4xx) other than 408 and 429 are not retried.
        """
        async with self._room:
            delivery = await self.try_once(webhook, message, self._seconds)
            tries = 1
            for pause in self._pauses:
                if not delivery.reason or delivery.final:
                    break
                await asyncio.sleep(pause)
                delivery = await self.try_once(webhook, message, self._seconds)
                tries += 1
        if not delivery.reason:
            return ""
        return f"{delivery.reason} ({tries} {'try' if tries == 1 else 'tries'})"

    async def try_once(self, webhook: Webhook, message: FiringMessage, seconds: float) -> Delivery:
        """Call a webhook once, without waiting for other calls."""
        try:
            url, content = request_of(webhook, message, self._wall())
            target = httpx.URL(url)
            if self._hosts and target.raw_host.decode("ascii") not in self._hosts:
                reason = "its host is not among STAGESCOPE_WEBHOOK_HOSTS"
                return Delivery(reason=reason, final=True)
            status, body = await asyncio.wait_for(
                self._post(target, content, reads=webhook.format != "json"), seconds
            )
        except asyncio.TimeoutError:
            return Delivery(reason=f"no answer in {seconds:g} s{_unused_proxy(webhook)}")
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            # Only its type: the text of an error may contain the URL.
            name = type(error).__name__
            return Delivery(reason=f"it cannot be reached: {name}{_unused_proxy(webhook)}")
        return read_answer(webhook, status, body)

    async def _post(self, url: httpx.URL, content: bytes, *, reads: bool) -> tuple[int, bytes]:
        """Post a body; return the answer's status and the begin of its body."""
        # A transport, since a client logs the URL of each request. Creating its TLS context takes
        # too long for the event loop.
        transport = await asyncio.to_thread(httpx.AsyncHTTPTransport)
        timeout = httpx.Timeout(self._seconds).as_dict()
        headers = {
            "content-type": "application/json; charset=utf-8",
            "user-agent": "stagescope",
            "accept-encoding": "identity",
        }
        request = httpx.Request(
            "POST", url, content=content, headers=headers, extensions={"timeout": timeout}
        )
        body = bytearray()
        async with transport:
            response = await transport.handle_async_request(request)
            try:
                if reads:
                    async for piece in response.aiter_raw():
                        body += piece[: MAX_ANSWER - len(body)]
                        if len(body) >= MAX_ANSWER:
                            break
            finally:
                await response.aclose()
            return response.status_code, bytes(body)


def _unused_proxy(webhook: Webhook) -> str:
    name = unused_variable(webhook.url)
    return f"; webhooks are called directly, {name} is not used" if name else ""


def read_answer(webhook: Webhook, status: int, body: bytes) -> Delivery:
    """Return the text of an answer, without secrets of the webhook that it may repeat."""
    text = body.decode("utf-8", "replace")
    if webhook.format == "slack":
        # `ok`, or the name of an error, such as invalid_payload or no_service.
        found = _SLACK_ERROR.fullmatch(text.strip())
        name = found[0] if found and not webhook.reveals(found[0]) else ""
        answer = f"{status} {name}".strip()
    else:
        answer = str(status)
    if not 200 <= status < 300:
        final = status < 500 and status not in (408, 429)
        return Delivery(answer, f"it answered {answer}", final)
    codes = _CODES.get(webhook.format)
    if codes is None:
        return Delivery(answer)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    known = fields if isinstance(fields, dict) else {}
    code = next((known[name] for name in codes if type(known.get(name)) is int), None)
    if code is None:
        missing = f"it answered {status} without the code that {webhook.format} answers"
        return Delivery(answer, missing, final=True)
    said = shortened(one_line(str(known.get(_TEXTS[webhook.format]) or "")), 200)
    if webhook.reveals(said):
        said = "(its text repeats parts of the webhook's address)"
    answer = f"{status}, code {code}{f': {said}' if said else ''}"
    if code == 0:
        return Delivery(answer)
    return Delivery(answer, f"it answered {answer}", final=code not in _TEMPORARY[webhook.format])
