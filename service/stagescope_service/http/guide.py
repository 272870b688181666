"""The documentation at /guide/: the site that `make docs` builds from docs/ into this package."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import os
import re
from pathlib import Path
from typing import Final

from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from stagescope_service.http.page import DOCS_POLICY, HEADERS

FOLDER: Final = Path(__file__).with_name("guide_pages")
"""Ignored by git; a wheel has it."""
_NOT_BUILT: Final = """\
The guide was not built when this service was installed.
Run `make docs` in the clone of stagescope. It takes a minute.
If you installed with `pip install -e`, load this page again.
If not, run your `pip install '/path/to/clone[service]'` once more with --force-reinstall --no-deps.
Until then, read docs/index.md in the clone.
"""
_INLINE: Final = re.compile(rb"<script>(.*?)</script>", re.S)


class _Pages(StaticFiles):
    """The files of the site, with the headers of the page."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a file, or the first page of a folder."""
        try:
            answer = await super().get_response(path, scope)
        except HTTPException as error:
            if error.status_code != 404:
                raise
            return PlainTextResponse(
                "The guide has no such page.\nIts first page is /guide/.\n", 404, HEADERS
            )
        answer.headers.update({**HEADERS, "Cache-Control": "no-cache"})
        if isinstance(answer, FileResponse) and answer.media_type == "text/html":
            policy = await asyncio.to_thread(
                _policy, str(answer.path), os.stat(answer.path).st_mtime_ns
            )
            answer.headers["Content-Security-Policy"] = policy
        return answer


@functools.lru_cache(maxsize=256)
def _policy(path: str, _mtime: int) -> str:
    """Return the policy of a page: of inline scripts only its own run."""
    scripts = _INLINE.findall(Path(path).read_bytes())
    hashes = {base64.b64encode(hashlib.sha256(each).digest()).decode() for each in scripts}
    allowed = " ".join(f"'sha256-{each}'" for each in sorted(hashes))
    return f"{DOCS_POLICY}; script-src 'self' {allowed}"


@functools.cache
def _pages(folder: Path) -> _Pages:
    return _Pages(directory=folder, html=True)


async def _guide(scope: Scope, receive: Receive, send: Send) -> None:
    is_built = await asyncio.to_thread(FOLDER.is_dir)
    answer = _pages(FOLDER) if is_built else PlainTextResponse(_NOT_BUILT, 404, HEADERS)
    await answer(scope, receive, send)


async def _without_slash(_request: Request) -> Response:
    return RedirectResponse("guide/")


ROUTES: Final = (Route("/guide", _without_slash), Mount("/guide", _guide))
"""Routes that are no part of the API's document, and need no token: the pages hold no data."""
