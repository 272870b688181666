"""A Unix socket to the coordinator, on which commands and queries overtake the calls of ranks.

Ray delivers an actor's calls in order of arrival, at about a millisecond each. A call behind 20 000
calls of ranks waits until all of them have started, in any concurrency group. The API therefore
uses a Unix socket in the service's home, which the coordinator's own loop serves. Each call has its
own connection, with one line of JSON in each direction. The socket has mode 0600: only the
service's own user can connect. Without a socket (an API on another node, a file system without
sockets), the API calls the actor through Ray, as ranks do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from stagescope_wire.errors import StagescopeError, error_of_code
from stagescope_wire.links import links_from_json
from stagescope_wire.nonfinite import Json, JsonObject

logger = logging.getLogger(__name__)

FILE: Final = "coordinator.sock"
MAX_BYTES: Final = 64 << 20
"""Most bytes of one line; requests to the API are limited far below."""
_MAX_ADDRESS: Final = 100
"""Bytes of a path that fit into a socket's address on every system (Linux: 107)."""

Reply = dict[str, Json]
Method = Callable[..., Awaitable[Reply]]


class Broken(Exception):
    """No coordinator listens, or the connection ended after the call was sent (`was_sent`)."""

    def __init__(self, why: str, *, was_sent: bool) -> None:
        self.was_sent = was_sent
        super().__init__(why)


async def serve(folder: Path, methods: Mapping[str, Method]) -> asyncio.Server:
    """Answer calls of `methods` over a socket in `folder`, in the running loop.

    Raises:
        OSError: the folder cannot have a socket.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readline()
            if line:
                writer.write(await _answer(line, methods))
                await writer.drain()
        except (OSError, ValueError):
            logger.debug("a caller left before its answer", exc_info=True)
        finally:
            writer.close()

    with _address(folder) as address:
        # It replaces the socket of a dead coordinator.
        server = await asyncio.start_unix_server(answer, address, limit=MAX_BYTES)
        os.chmod(address, 0o600)
        return server


async def call(folder: Path, method: str, arguments: JsonObject) -> Reply:
    """Call a method of the coordinator that serves `folder` on this machine.

    Raises:
        Broken: no coordinator listens, or the connection ended before an answer.
        StagescopeError: raised by the method.
    """
    try:
        with _address(folder) as address:
            reader, writer = await asyncio.open_unix_connection(address, limit=MAX_BYTES)
    except (OSError, AttributeError) as error:
        raise Broken(str(error), was_sent=False) from error
    try:
        writer.write(json.dumps({"method": method, "arguments": arguments}).encode() + b"\n")
        await writer.drain()
        line = await reader.readline()
    except OSError as error:
        raise Broken(str(error), was_sent=True) from error
    finally:
        writer.close()
    if not line.endswith(b"\n"):
        raise Broken("no whole answer came", was_sent=True)
    response = json.loads(line)
    if (problem := response.get("error")) is not None:
        kind = error_of_code(problem["code"])
        raise kind(
            problem["wrong"],
            expected=problem["expected"],
            advice=problem["advice"],
            see=links_from_json(problem["see"]),
        )
    reply: Reply = response["answer"]
    return reply


async def _answer(line: bytes, methods: Mapping[str, Method]) -> bytes:
    try:
        request = json.loads(line)
        answer = await methods[request["method"]](**request["arguments"])
        return json.dumps({"answer": answer}).encode() + b"\n"
    except StagescopeError as error:
        problem = _problem(error)
    except Exception as error:
        logger.exception("a call over %s failed", FILE)
        wrong = f"the coordinator failed with {type(error).__name__}"
        problem = _problem(StagescopeError(wrong, advice="its log has the traceback"))
    return json.dumps({"error": problem}).encode() + b"\n"


def _problem(error: StagescopeError) -> JsonObject:
    return {
        "code": error.code,
        "wrong": error.wrong,
        "expected": error.expected,
        "advice": error.advice,
        "see": [link.to_json() for link in error.see],
    }


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Yield the socket's path; through an open folder if it is too long for an address."""
    path = folder / FILE
    if len(os.fsencode(path)) <= _MAX_ADDRESS:
        yield str(path)
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{FILE}"
    finally:
        os.close(descriptor)
