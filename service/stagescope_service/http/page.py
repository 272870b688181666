"""The page and the files it loads, its login, the API's documentation, and ETags of answers.

Everything comes from this service: the page's own modules, the published bundle of Plotly,
Swagger UI of the installed fastapi-offline. The Content-Security-Policy lets a browser fetch
nothing from elsewhere and run no inline script.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import hashlib
import importlib.util
from pathlib import Path
from typing import Final, NamedTuple

from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stagescope_service.figure_style import PLOTLY, plotly_script
from stagescope_service.http.access_tokens import Access
from stagescope_service.http.auth import COOKIE, COOKIE_SECONDS, HOME, caller_of
from stagescope_service.http.parameters import Deps
from stagescope_service.http.requests import Answer, read_json
from stagescope_service.views.models import service as models
from stagescope_service.views.models.bodies import LoginRequest
from stagescope_wire.errors import NotFound, Unauthorized
from stagescope_wire.versions import install_command

router = APIRouter(tags=["page"])

_MAX_LOGIN_BYTES: Final = 4096
"""Anybody may send a login: its body must not take the memory of other requests."""


# --- login ----------------------------------------------------------------------------------
@router.post(
    "/login", status_code=204, response_class=Response, openapi_extra=LoginRequest.document()
)
async def login(request: Request, deps: Deps) -> Response:
    """Trade a token for a cookie, for browsers; needs no other authentication.

    The cookie allows what the token does, for a week or until the token is replaced. It is not the
    token, scripts cannot read it, and no other site's page can send it. Browsers send it only below
    the folder of this request's address, so other services of the host do not get it. A request
    that changes something must also come from this service's page.
    """
    fields = await read_json(request, deps.settings, limit=_MAX_LOGIN_BYTES)
    body = LoginRequest.parse(fields)
    access: Access | None = request.app.state.access
    answer = Response(status_code=204)
    if access is None:
        return answer
    token = access.of_bearer(body.token.strip())
    if token is None:
        raise Unauthorized(
            "this is not a token of this service",
            expected="a token of your own, or the content of read.token or operate.token of "
            f"{HOME}",
        )
    _set_cookie(request, answer, access.login(token, request.cookies.get(COOKIE, "")))
    return answer


@router.post("/logout", status_code=204, response_class=Response)
async def logout(request: Request) -> Response:
    """Remove the login of this service from the browser's cookie."""
    access: Access | None = request.app.state.access
    answer = Response(status_code=204)
    if access is not None and COOKIE in request.cookies:
        _set_cookie(request, answer, access.logout(request.cookies[COOKIE]))
    return answer


@router.get("/whoami", response_model=models.Whoami)
async def whoami(request: Request, deps: Deps) -> Answer:
    """Return what the sender of this request may do, and under which name it is audited."""
    caller = caller_of(request)
    # Of `BundleCommands` alone.
    bundle, opens = (getattr(deps.commands, name, None) for name in ("bundle", "opens"))
    role = None if caller.grade == "open" else caller.grade
    return Answer(
        {
            "grade": "operate" if role == "admin" else role,
            # Without tokens everybody on this machine may do everything.
            "role": "admin" if request.app.state.access is None else role,
            "user": caller.user,
            "token": caller.token.name if caller.token and not caller.person else None,
            "person": caller.person,
            "runs": None,
            "bundle": bundle if isinstance(bundle, str) else None,
            "opens": opens if opens and isinstance(opens, str) else None,
        }
    )


def _set_cookie(request: Request, answer: Response, value: str) -> None:
    # Behind a proxy that ends TLS, only headers say that the browser's connection is secure.
    origin = request.headers.get("origin", "").partition("://")[0]
    is_secure = "https" in (origin, request.headers.get("x-forwarded-proto"), request.url.scheme)
    answer.set_cookie(
        COOKIE,
        value,
        max_age=COOKIE_SECONDS if value else 0,
        path=None,  # the browser's default: the folder of the page, below which a proxy serves it
        secure=is_secure,
        httponly=True,
        samesite="strict",
    )


# --- files ----------------------------------------------------------------------------------
_FOLDER: Final = Path(__file__).with_name("static")
_INDEX: Final = "index.html"
_DOCS_SCRIPT: Final = "docs.js"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_EMPTY_SHA256: Final = "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="
# Plotly adds its rules by script to a style element that is empty when the browser checks it, and
# draws heat maps as images made in the page.
_POLICY: Final = (
    "default-src 'self'; img-src 'self' data: blob:; "
    f"style-src 'self' 'sha256-{_EMPTY_SHA256}'; style-src-attr 'unsafe-inline'; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
# Swagger UI has its pictures inside its style sheet, and sets styles as its components appear.
DOCS_POLICY: Final = _POLICY.replace(f"'sha256-{_EMPTY_SHA256}'", "'unsafe-inline'")
HEADERS: Final = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
_REVALIDATED: Final = "no-cache"
_IMMUTABLE: Final = "max-age=31536000, immutable"
_ENCODED: Final = 1024
"""Least bytes of a file that is sent compressed."""


class _File(NamedTuple):
    """A file as it is sent."""

    body: bytes
    compressed: bytes | None
    media_type: str
    tag: str
    """Its ETag: a checksum of its content."""


def _as_file(name: str, body: bytes) -> _File:
    compressed = gzip.compress(body, 6, mtime=0) if len(body) >= _ENCODED else None
    tag = hashlib.blake2b(body, digest_size=12).hexdigest()
    return _File(body, compressed, _TYPES[Path(name).suffix], f'"{tag}"')


def _names() -> list[str]:
    """Return the names of the page's own files."""
    return sorted(path.name for path in _FOLDER.iterdir() if path.suffix in _TYPES)


@functools.cache
def _version() -> str:
    """Return a checksum of all files of the page, which its URLs hold."""
    found = hashlib.blake2b(digest_size=8)
    for name in _names():
        found.update(_file(name).tag.encode())
    return found.hexdigest()


def compress() -> None:
    """Compress the files of the page, which takes a fifth of a second, before somebody waits."""
    _version()


@functools.cache
def _file(name: str) -> _File:
    if name == PLOTLY.name:
        return _as_file(name, plotly_script().encode())
    if name in _SWAGGER:
        return _as_file(name, _swagger_folder().joinpath(name).read_bytes())
    if name not in _names():
        raise NotFound(f"there is no file {name!r:.100}", expected=f"one of {', '.join(_names())}")
    return _as_file(name, (_FOLDER / name).read_bytes())


@functools.cache
def _page(name: str) -> _File:
    """Return an HTML file whose references hold the version of the page's files.

    It names every module that its scripts import, so that a browser asks for all of them at once:
    otherwise it learns of them file by file.
    """
    text = (_FOLDER / name).read_text(encoding="utf-8")
    preloads = "".join(f'<link rel="modulepreload" href="static/{each}">\n' for each in _modules())
    text = text.replace("</head>", f"{preloads}</head>") if name == _INDEX else text
    return _as_file(name, text.replace('"static/', f'"static/{_version()}/').encode())


def _modules() -> list[str]:
    """Return the names of the modules of the page."""
    modules = (each for each in _names() if each.endswith((".js", ".mjs")))
    return [each for each in modules if each not in (_DOCS_SCRIPT, PLOTLY.name)]


async def index(request: Request) -> Response:
    """Return the page."""
    file = await asyncio.to_thread(_page, _INDEX)
    return _send_file(request, file, cache=_REVALIDATED, policy=_POLICY)


async def static(request: Request) -> Response:
    """Return a file; browsers keep it for good if it is below the current version's folder."""
    version, name = request.path_params.get("version"), request.path_params["name"]
    file = await asyncio.to_thread(_file, name)
    is_current = version is not None and version == await asyncio.to_thread(_version)
    return _send_file(request, file, cache=_IMMUTABLE if is_current else _REVALIDATED)


def _send_file(request: Request, file: _File, *, cache: str, policy: str = "") -> Response:
    headers = {
        **HEADERS,
        "Cache-Control": cache,
        "ETag": file.tag,
        "Vary": "Accept-Encoding",
        **({"Content-Security-Policy": policy} if policy else {}),
    }
    if _has(request.headers, file.tag):
        return Response(status_code=304, headers=headers)
    accepted = request.headers.get("accept-encoding", "")
    if file.compressed is not None and "gzip" in accepted:
        headers["Content-Encoding"] = "gzip"
        return Response(file.compressed, 200, headers, file.media_type)
    return Response(file.body, 200, headers, file.media_type)


# --- documentation --------------------------------------------------------------------------
_SWAGGER: Final = ("swagger-ui-bundle.js", "swagger-ui.css")


def _swagger_folder() -> Path:
    """Return the folder of Swagger UI in the installed fastapi-offline, which is not imported.

    Raises:
        NotFound: it is not installed.
    """
    found = importlib.util.find_spec("fastapi_offline")
    if found is None or found.origin is None:
        raise NotFound(
            "the files of Swagger UI are not installed",
            advice=f"{install_command('service')} brings them (fastapi-offline); "
            "/openapi.json is the document itself",
        )
    return Path(found.origin).with_name("static")


async def docs(request: Request) -> Response:
    """Return the API's documentation."""
    await asyncio.to_thread(_swagger_folder)
    file = await asyncio.to_thread(_page, "docs.html")
    return _send_file(request, file, cache=_REVALIDATED, policy=DOCS_POLICY)


FILES: Final = (
    Route("/", index),
    Route("/docs", docs),
    Route("/static/{name}", static),
    Route("/static/{version}/{name}", static),
)
"""Routes that are no part of the API's document."""


# --- ETags of answers -----------------------------------------------------------------------
class EntityTags:
    """ASGI middleware: a JSON answer to GET has an ETag, and is 304 where the client has it.

    A page that repeats a request then gets a few bytes if nothing changed. The answer is still
    computed: a slow route must cache its own results.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http" or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return
        held: list[Message] = []

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start" and _is_answer(message):
                held.append(message)
                return
            if held:
                start = held.pop()
                if not message.get("more_body", False):
                    start, message = _with_tag(Headers(scope=scope), start, message)
                await send(start)
            await send(message)

        await self.app(scope, receive, sent)


def _is_answer(start: Message) -> bool:
    headers = Headers(raw=start["headers"])
    is_json = headers.get("content-type", "").startswith("application/json")
    return start["status"] == 200 and is_json and "etag" not in headers


def _with_tag(request: Headers, start: Message, body: Message) -> tuple[Message, Message]:
    tag = f'"{hashlib.blake2b(body["body"], digest_size=12).hexdigest()}"'
    headers = MutableHeaders(raw=list(start["headers"]))
    headers["ETag"] = tag
    headers["Cache-Control"] = "private, no-cache"
    if not _has(request, tag):
        return {**start, "headers": headers.raw}, body
    del headers["content-length"]
    del headers["content-type"]
    return {**start, "status": 304, "headers": headers.raw}, {**body, "body": b""}


def _has(request: Headers, tag: str) -> bool:
    """Return whether the sender of a request has the answer of this tag."""
    given = request.get("if-none-match", "")
    return tag in [each.strip().removeprefix("W/") for each in given.split(",")]
