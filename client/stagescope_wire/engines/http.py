"""HTTP calls to an engine: bounded answers, one deadline per call, a key that is never shown."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from stagescope_wire import proxies
from stagescope_wire.discovery import check_token, check_url, load_httpx, read_token
from stagescope_wire.errors import EngineError, InvalidInput
from stagescope_wire.nonfinite import Json, JsonObject

load_httpx()
import httpx  # noqa: E402 - without its command line, which imports rich

KEY_VARIABLE: Final = "STAGESCOPE_ENGINE_KEY"
KEY_FILE_VARIABLE: Final = "STAGESCOPE_ENGINE_KEY_FILE"
MAX_BYTES: Final = 64 << 20
"""Most bytes of one answer."""
PARALLEL: Final = 8
"""Concurrent requests to one engine, which batches them itself."""
_SHOWN: Final = 300
_HOST: Final = re.compile(r"[A-Za-z0-9._:-]+\Z")

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


def engine_key(key_file: str | Path | None = None) -> str | None:
    """Return the bearer key of an engine: from a file, else from the environment.

    Raises:
        Unauthorized: the file cannot be read, or either does not contain exactly one word.
    """
    path = key_file or os.environ.get(KEY_FILE_VARIABLE)
    if path:
        return read_token(path)
    return check_token(os.environ.get(KEY_VARIABLE), KEY_VARIABLE)


def engine_url(text: str) -> str:
    """Return the base URL of `http://HOST:PORT` or HOST:PORT, without a trailing `/v1`.

    Raises:
        InvalidInput: not an http or https URL, or one with a query, a fragment or a password.
    """
    url = check_url(text if "://" in text else f"http://{text}")
    parsed = httpx.URL(url)
    if parsed.fragment or not _HOST.match(parsed.host):
        raise InvalidInput(
            f"{text!r:.200} is not the URL of an engine", expected="http://HOST:PORT"
        )
    return url.removesuffix("/v1")


class EngineHttp:
    """One engine's HTTP connections; safe to use from several threads.

    Redirects are not followed, so that the key is sent to the engine's own URL only.
    """

    def __init__(self, url: str, *, key: str | None = None, timeout: float = 120.0) -> None:
        self.url = engine_url(url)
        self.timeout = timeout
        self._key = key = check_token(key, "the key of the engine")
        self._client = httpx.Client(
            headers={"authorization": f"Bearer {key}"} if key else {},
            transport=proxies.transport(self.url),
            trust_env=False,
            follow_redirects=False,
            timeout=timeout,
        )

    def __repr__(self) -> str:
        return f"<EngineHttp {self.url}>"

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def get(self, path: str, *, timeout: float | None = None) -> Json:
        """Return the JSON that `path` answers; None if it answers 404 or 405.

        Raises:
            EngineError: nothing answers, or the answer is not JSON.
        """
        status, content = self._send("GET", path, None, timeout)
        if status in (404, 405):
            return None
        return self._json(status, content, path)

    def status(self, path: str, *, timeout: float) -> int:
        """Return the HTTP status of `path`.

        Raises:
            EngineError: nothing answers.
        """
        return self._send("GET", path, None, timeout)[0]

    def post(self, path: str, body: JsonObject) -> Json:
        """Return the JSON that `path` answers to `body`.

        Raises:
            EngineError: nothing answers in time, the engine refuses, or the answer is not JSON.
        """
        status, content = self._send("POST", path, body, None)
        return self._json(status, content, path)

    def _send(
        self, method: str, path: str, body: JsonObject | None, timeout: float | None
    ) -> tuple[int, bytes]:
        seconds = timeout or self.timeout
        deadline = time.monotonic() + seconds
        content = bytearray()
        late = EngineError(
            f"the engine at {self.url} did not answer {path} within {seconds:g} s",
            advice="give a longer timeout, or fewer tokens",
        )
        try:
            with self._client.stream(
                method, self.url + path, json=body, timeout=seconds
            ) as response:
                for chunk in response.iter_bytes():
                    content += chunk
                    if len(content) > MAX_BYTES:
                        raise EngineError(
                            f"{self.url}{path} returned more than {MAX_BYTES >> 20} MiB",
                            advice="ask for fewer tokens at once",
                        )
                    # httpx limits a single read only: a slow stream could last forever.
                    if time.monotonic() > deadline:
                        raise late
                return response.status_code, bytes(content)
        except httpx.TimeoutException as error:
            raise late from error
        except httpx.HTTPError as error:
            reason = proxies.reason_of(error)
            hint = proxies.unused_proxy(self.url)
            raise EngineError(
                f"the engine at {self.url} cannot be reached{proxies.way_to(self.url)}: {reason}",
                advice="is it running, and is this its address?" + (f"; {hint}" if hint else ""),
            ) from error

    def _json(self, status: int, content: bytes, path: str) -> Json:
        if status in (401, 403):
            raise EngineError(
                f"the engine at {self.url} returned {status} for {path}{proxies.way_to(self.url)}",
                expected="its key",
                advice=f"give it in a file ({KEY_FILE_VARIABLE}, --key-file) or as {KEY_VARIABLE}",
            )
        if not 200 <= status < 300:
            raise EngineError(f"the engine at {self.url} returned {status} for {path}"
                              f"{proxies.way_to(self.url)}: {self.shown(content)}")  # fmt: skip
        try:
            return json.loads(content)
        except ValueError as error:
            raise EngineError(
                f"{self.url}{path} returned no JSON: {self.shown(content)}",
                advice="is this the address of an inference engine?",
            ) from error

    def shown(self, content: bytes) -> str:
        """Return the beginning of an answer for a message, with the key masked."""
        text = content[: 4 * _SHOWN].decode("utf-8", "replace")
        if self._key:
            text = text.replace(self._key, "***")
        return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:_SHOWN]

    def each(
        self, request: Callable[[_Item], _Answer], items: Sequence[_Item], parallel: int = PARALLEL
    ) -> list[_Answer]:
        """Return `request(item)` for each item, in order; up to `parallel` run concurrently."""
        if len(items) < 2:
            return [request(item) for item in items]
        pool = ThreadPoolExecutor(min(parallel, len(items)), "engine")
        try:
            return list(pool.map(request, items))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C waits for no answer
