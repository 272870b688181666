"""Answers errors as problem+json (RFC 9457).

A problem holds `type` (`urn:stagescope:<code>`), `title`, `status`, `detail` (a full sentence) and
`instance` (the path). For programs it holds the parts of the sentence: `code`, `wrong`, `expected`
and `advice`. Answers of the service that the advice leads to are in `see`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Final, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import Field
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from stagescope_service.refusals import expected_of, is_missing, name_of
from stagescope_service.views.encoding import JsonObject, encode
from stagescope_service.views.models.common import ABSENT, Model
from stagescope_service.views.models.common import Link as LinkModel
from stagescope_wire.errors import InvalidInput, NotReady, StagescopeError
from stagescope_wire.links import with_links

MEDIA_TYPE: Final = "application/problem+json"
RETRY_SECONDS: Final = 1


class _BadParameters(InvalidInput):
    """Parameters of another type or out of bounds.

    Only `detail` names the API's document: who types a command does not read it.
    """


class Problem(Model):
    """An error of a request, after RFC 9457."""

    type: Annotated[str, Field(examples=["urn:stagescope:not_found"])]
    """A URN that names the kind of error: `urn:stagescope:` and `code`."""
    title: Annotated[str, Field(examples=["Not Found"])]
    """The HTTP status in words."""
    status: Annotated[int, Field(examples=[404])]
    """The HTTP status, a number."""
    detail: str
    """The error, what was expected and the advice, as one sentence."""
    instance: str
    """The path of the request."""
    code: Annotated[str, Field(examples=["not_found"])]
    """Stable name of the kind of error."""
    reason: str = ABSENT
    """Stable name of the reason, where a program acts on it: `not_measured` (no numbers yet)."""
    wrong: str
    """What was wrong."""
    expected: str
    """The value or state that was expected; empty where it is not known."""
    advice: str
    """The advice, with the paths to look at; empty where there is none."""
    see: list[LinkModel]
    """What to look at, as data."""


def problem(error: StagescopeError, path: str, status: int, code: str) -> JsonObject:
    """Return the body of the answer to a request for `path` that failed with `error`."""
    advice = with_links(error.advice, error.see)
    expected = f"expected {error.expected}" if error.expected else ""
    described = "/openapi.json describes them" if isinstance(error, _BadParameters) else ""
    return {
        "type": f"urn:stagescope:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": "; ".join(part for part in (error.wrong, expected, advice, described) if part),
        "instance": path,
        "code": code,
        **({"reason": error.reason} if error.reason else {}),
        "wrong": error.wrong,
        "expected": error.expected,
        "advice": advice,
        "see": [link.to_json() for link in error.see],
    }


def error_response(error: StagescopeError, path: str, seconds: int | None = None) -> Response:
    """Return the answer to a request that failed with `error`; `seconds`: when to ask again."""
    body = problem(error, path, error.status, error.code)
    headers = {}
    if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        seconds = seconds or RETRY_SECONDS
    if seconds is not None:
        headers["Retry-After"] = str(seconds)
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer realm="stagescope"'
    return Response(encode(body), error.status, headers, MEDIA_TYPE)


def add_handlers(app: FastAPI) -> None:
    """Let `app` answer every error with a problem."""
    app.add_exception_handler(StagescopeError, _on_stagescope_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected_error)


Reply = TypeVar("Reply", bound=Mapping[str, object])


def check_ready(reply: Reply) -> Reply:
    """Return the coordinator's `reply`.

    Raises:
        NotReady: the reply is that the coordinator cannot serve yet.
    """
    if reply.get("not_ready"):
        raise NotReady(
            f"the coordinator is not ready: {reply['not_ready']}",
            advice="nothing was recorded; send the same again in a moment",
        )
    return reply


async def _on_stagescope_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, StagescopeError)
    return error_response(error, request.url.path)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(refusal(error.errors()), request.url.path)


_PARTS: Final = ("query", "path", "header", "cookie", "body")


def refusal(errors: Sequence[ErrorDetails]) -> InvalidInput:
    """Return the error of a request whose parameters have other types, or lie out of bounds."""
    wrongs, expected = [], []
    for item in errors:
        name = name_of(item, without=_PARTS)
        lacks = is_missing(item)
        wrongs.append(f"{name} is missing" if lacks else f"{name} is {item.get('input')!r:.100}")
        expected.append(f"{name}: {expected_of(item)}")
    return _BadParameters("; ".join(wrongs), expected="; ".join(expected))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    expected, status, headers = "", error.status_code, dict(error.headers or {})
    allowed = headers.get("Allow") or headers.get("allow", "")
    # Routes that change something have paths that any address below a run matches.
    reads = request.method in ("GET", "HEAD") and not {"GET", "POST"} & {*_methods(allowed)}
    if status == HTTPStatus.METHOD_NOT_ALLOWED and reads:
        status, headers = HTTPStatus.NOT_FOUND, {}
    if status == HTTPStatus.NOT_FOUND:
        wrong, code = f"there is no route {request.url.path:.200}", "not_found"
        near = _routes_near(request)
        expected = f"{'one of ' if len(near) > 1 else ''}{', '.join(near)}; " if near else ""
        expected += "/openapi.json lists all routes" if near else "a route of /openapi.json"
    elif status == HTTPStatus.METHOD_NOT_ALLOWED:
        wrong, code = f"{request.method} is not possible here", "method_not_allowed"
        expected = allowed
    else:
        wrong, code = str(error.detail), "http"
    found = StagescopeError(wrong, expected=expected)
    body = problem(found, request.url.path, status, code)
    return Response(encode(body), status, headers, MEDIA_TYPE)


def _methods(allowed: str) -> list[str]:
    return [name.strip() for name in allowed.split(",")]


_NAMED_ROUTES: Final = 12
"""Most routes that an error names."""
_CLOSE: Final = 0.75
"""Least likeness of two words of which one may be a misspelling of the other."""
_OF_COMMANDS: Final = {
    "collectives": "stuck", "doctor": "diagnosis", "gradient": "loss", "lost": "losses",
    "progress": "captures",
}  # fmt: skip
"""Name of a command -> the word of its route, where that is another."""


def _routes_near(request: Request) -> list[str]:
    """Return the routes that read what the requested path may mean, the likeliest first.

    These have the most words of the path: as they are, as the name of a command, or misspelt.
    Figures come last.
    """
    requested = request.url.path.strip("/").split("/")
    words = {path: _words(path) for path in request.app.state.readable}
    known = {word for own in words.values() for word in own}
    meant: set[str] = set()
    for part in requested:
        name = _OF_COMMANDS.get(part, part)
        close = difflib.get_close_matches(name, known, n=2, cutoff=_CLOSE)
        meant.update([name] if name in known else close)

    most = max(len(own & meant) for own in words.values())
    near = [path for path in words if most and len(words[path] & meant) == most]

    def order(path: str) -> tuple[bool, int, str]:
        depth = path.strip("/").count("/") + 1
        return "figures" in words[path] - meant, abs(depth - len(requested)), path

    return sorted(near, key=order)[:_NAMED_ROUTES]


def _words(path: str) -> set[str]:
    """Return the parts of a route's path that are no parameters."""
    return {part for part in path.strip("/").split("/") if not part.startswith("{")}


async def _on_disconnect(request: Request, error: Exception) -> Response:
    # The client has gone, which is no error of the service: no traceback in the log.
    return Response(status_code=HTTPStatus.BAD_REQUEST)


async def _on_unexpected_error(request: Request, error: Exception) -> Response:
    # The message may hold paths or rows: the server logs it with its traceback, and the answer
    # does not contain it.
    found = StagescopeError(
        f"the service failed with {type(error).__name__}",
        advice="the service's log has the traceback",
    )
    body = problem(found, request.url.path, 500, "internal")
    return Response(encode(body), 500, media_type=MEDIA_TYPE)
