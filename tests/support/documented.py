"""Holds the answers of the API to its own document."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from stagescope_service.http.app import make_app
from stagescope_service.settings import Settings


def _validators() -> object:
    """Return the library; None with the lowest versions, whose answers are the same."""
    try:
        import jsonschema_rs
    except ImportError:
        return None
    return jsonschema_rs


VALIDATORS: Any = _validators()


class Answered(NamedTuple):
    """An answer as it was sent."""

    method: str
    path: str
    status: int
    media_type: str
    body: bytes


class Recorder:
    """Middleware that keeps the JSON answers of an app, to be checked after the test.

    Args:
        app: what answers.
        answers: grows by each answer.
    """

    def __init__(self, app: ASGIApp, answers: list[Answered]) -> None:
        self.app = app
        self.answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: MutableMapping[str, Any] = {}
        body = bytearray()

        async def sent(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            elif b"json" in _media_type(start):
                body.extend(message.get("body", b""))
            await send(message)

        await self.app(scope, receive, sent)
        media_type = _media_type(start).decode()
        if VALIDATORS is not None and media_type.endswith("json"):
            self.answers.append(
                Answered(scope["method"], scope["path"], start["status"], media_type, bytes(body))
            )


def check(answers: Sequence[Answered]) -> None:
    """Fail where an answer is not as the document says."""
    wrong = dict.fromkeys(text for answer in answers for text in _wrong_with(answer))
    assert not wrong, f"{len(wrong)} answers unlike the document: " + "\n".join([*wrong][:10])


def _wrong_with(answer: Answered) -> Iterator[str]:
    operation = _operation(answer.method, answer.path)
    if operation is None:
        return
    where = f"{operation.method} {answer.path} {answer.status}"
    validator = _validator(operation, answer.status, answer.media_type)
    if validator is None:
        yield f"{where}: no schema of {answer.media_type} in the document"
        return
    for error in validator.iter_errors(json.loads(answer.body)):
        yield f"{where}: {'/'.join(map(str, error.instance_path))}: {error.message:.300}"


class Operation(NamedTuple):
    """An operation of the document."""

    method: str
    path: str


@functools.cache
def document() -> Mapping[str, Any]:
    """Return the document; it is the same of every app."""
    # Nothing of it is asked: the document is of the routes alone.
    nobody: Any = None
    settings = Settings(home=Path("/nonexistent"), auth=False)
    return make_app(catalogue=nobody, commands=nobody, settings=settings, tokens=None).openapi()


@functools.lru_cache(maxsize=4096)
def _operation(method: str, path: str) -> Operation | None:
    # Literal paths before those with parameters.
    for template in sorted(document()["paths"], key=lambda each: each.count("{")):
        pattern = re.sub(r"\\\{[^}]*\\\}", "[^/]+", re.escape(template))
        if method.lower() in document()["paths"][template] and re.fullmatch(pattern, path):
            return Operation(method, template)
    return None


@functools.cache
def _validator(operation: Operation, status: int, media_type: str) -> Any:
    responses = document()["paths"][operation.path][operation.method.lower()]["responses"]
    said = responses.get(str(status)) or responses.get(f"{status // 100}XX") or {}
    schema = said.get("content", {}).get(media_type, {}).get("schema")
    if schema is None:
        return None
    return VALIDATORS.Draft202012Validator({**schema, "components": document()["components"]})


def _media_type(start: MutableMapping[str, Any]) -> bytes:
    headers = dict(start.get("headers", ()))
    found: bytes = headers.get(b"content-type", b"").partition(b";")[0]
    return found
