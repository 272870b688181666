"""What routes share: bodies, paging, and the query's checks.

Dependencies that read nothing are `async`: a plain one would wait for a thread, and while heavy
questions hold them all an event would wait too.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from fastapi import Depends, Query, Request
from fastapi.dependencies.models import Dependant
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from stagescope.wire.errors import InvalidInput
from stagescope_service.api.bodies import BodyPools
from stagescope_service.api.encoding import decode, encode
from stagescope_service.settings import Settings


class Answer(JSONResponse):
    """JSON in which a non-finite number is the string "nan", "inf" or "-inf".

    FastAPI takes what a route returns as it is: its `response_model` is for the document alone.
    """

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return encode(content)


async def check_query(request: Request) -> None:
    """Refuse query parameters that a route does not know: a misspelled filter filters nothing.

    Raises:
        InvalidInput: names the ones that the route knows.
    """
    route = request.scope.get("route")
    if not isinstance(route, APIRoute):
        return
    known = _query_names(route.dependant)
    unknown = sorted(set(request.query_params) - known)
    if unknown:
        raise InvalidInput(
            f"unknown query parameter {', '.join(name[:50] for name in unknown[:5])}",
            expected=f"one of {', '.join(sorted(known))}" if known else "none",
        )
    for name in known:
        if len(request.query_params.getlist(name)) > 1:
            raise InvalidInput(f"query parameter {name} is given twice", expected="it once")


def _query_names(dependant: Dependant) -> set[str]:
    names = {field.alias for field in dependant.query_params}
    return names.union(*map(_query_names, dependant.dependencies))


async def read_json(request: Request, settings: Settings) -> dict[str, Any]:
    """Return a request's body, a JSON object.

    Raises:
        TooLarge: more than the settings allow.
        NotReady: it did not arrive in time.
        InvalidInput: something else.
    """
    pools: BodyPools = request.app.state.bodies
    async with pools.of(request).read(request, limit=settings.max_json_bytes) as text:
        said = decode(text)
    if not isinstance(said, dict):
        raise InvalidInput(f"the body is a {type(said).__name__}", expected="a JSON object")
    return said


_CURSOR: Final = re.compile(r"s1((?:\.-?[0-9]{1,18}){1,2})\Z")


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list is asked for: `limit` rows from the place that a cursor names."""

    limit: int
    at: tuple[int, ...] = ()

    @property
    def offset(self) -> int:
        """How many rows of the list come before the page."""
        return max(self.at[0], 0) if self.at else 0

    def answer(self, rows: Sequence[Mapping[str, Any]], more: bool) -> dict[str, Any]:
        """Return `rows` and the cursor of those that follow (null: there are none)."""
        return {"rows": list(rows), "next": cursor(self.offset + len(rows)) if more else None}

    def cut(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return this page of all `rows`."""
        end = self.offset + self.limit
        return self.answer(rows[self.offset : end], more=len(rows) > end)


def cursor(*place: int) -> str:
    """Return the opaque text that stands for a place in a list."""
    text = "s1." + ".".join(map(str, place))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


async def page_of(
    request: Request,
    limit: Annotated[
        int | None, Query(ge=1, description="Most rows; the service has a default and a maximum.")
    ] = None,
    cursor: Annotated[
        str | None, Query(max_length=100, description="The `next` of the page before.")
    ] = None,
) -> Page:
    """Read `limit` and `cursor`.

    Raises:
        InvalidInput: more rows than the service gives, or a cursor that it did not make.
    """
    settings: Settings = request.app.state.settings
    rows = limit or settings.page_size
    if rows > settings.max_page_size:
        raise InvalidInput(f"limit is {limit}", expected=f"at most {settings.max_page_size}")
    return Page(rows, () if cursor is None else _place(cursor))


def _place(text: str) -> tuple[int, ...]:
    try:
        padded = text + "=" * (-len(text) % 4)
        said = base64.b64decode(padded, altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        said = ""
    found = _CURSOR.match(said)
    if found is None:
        raise InvalidInput(f"cursor {text!r:.50} is not one of this service", expected="a `next`")
    return tuple(int(number) for number in found[1].split(".")[1:])


def pattern(text: str) -> dict[str, Any]:
    """Return what a parameter's document says of its form; what is wrong is said by its reader."""
    return {"pattern": text}


def step_number(text: str) -> int | None:
    """Return the step that a path names; None for `latest`.

    Raises:
        InvalidInput: neither.
    """
    if text == "latest":
        return None
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
        expected = "an integer of at most 18 digits, or 'latest'"
        raise InvalidInput(f"step is {text!r:.50}", expected=expected)
    return int(text)


PageOf = Annotated[Page, Depends(page_of)]
