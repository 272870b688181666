"""Asking one service: the connection, routes and tables that every kind of question is made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Final, TypeVar
from urllib.parse import quote

from stagescope import discovery
from stagescope.columns import COLUMNS, Kinds
from stagescope.findings import GROUP_ORDER, FindingRows
from stagescope.frames import Table
from stagescope.transport import Transport
from stagescope.wire import nonfinite
from stagescope.wire.errors import (
    CatalogueUnavailable,
    InvalidInput,
    NotReady,
    StagescopeError,
    Unreachable,
)

_Asking = TypeVar("_Asking", bound="Asking")

LIMIT: Final = 1000
"""Rows of a table unless `limit` says otherwise."""

_PAGE: Final = 500
_STEPS_END: Final = 10**18
"""Steps have fewer digits than this."""
_ASK_AGAIN: Final = 0.5
"""Seconds between two questions about something that the service is computing."""


class Asking:
    """A connection; usable from several threads."""

    def __init__(self, place: discovery.Place, *, timeout: float = 10.0) -> None:
        self._place = place
        self._transport = Transport(place, timeout=timeout)

    @property
    def url(self) -> str:
        """The service's URL."""
        return self._place.url

    def close(self) -> None:
        """Close the connections; the session cannot be used afterwards."""
        self._transport.close()

    def __enter__(self: _Asking) -> _Asking:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<stagescope.Session {self.url}, found by {self._place.found}>"

    def check(self) -> None:
        """Return if the service answers and accepts the token.

        Raises:
            Unreachable: nothing answers, or something else does.
            Unauthorized: no token, or a wrong one.
        """
        alive = self._transport.get("/healthz", patient=False)
        if not isinstance(alive, dict):
            raise Unreachable(
                f"what answers at {self.url} is not a stagescope service", advice="check the URL"
            )
        try:
            self._transport.get("/runs", {"limit": 1}, patient=False)
        except (NotReady, CatalogueUnavailable):
            # It lives and will answer; a later call waits for it with its own deadline.
            return

    def get(self, path: str, **params: Any) -> Any:
        """Return what a route answers, as it came; a query parameter of None is left out."""
        return self._transport.get(path, params)

    def download(
        self,
        path: str,
        params: Mapping[str, Any],
        write: Callable[[bytes, int], object],
        *,
        timeout: float,
    ) -> None:
        """Hand the bytes of a route's answer to `write`, piece by piece; see `Transport`."""
        self._transport.download(path, params, write, timeout=timeout)

    def table(
        self,
        path: str,
        params: Mapping[str, Any] | None = None,
        *,
        title: str = "",
        order: Sequence[str] = (),
        columns: Kinds = MappingProxyType({}),
        limit: int = LIMIT,
    ) -> Table:
        """Return the rows of a route, its pages followed up to `limit` rows.

        `columns` are those that every row has (`stagescope.columns`).
        """
        if limit < 1:
            raise InvalidInput(f"limit is {limit}", expected="a number of rows from 1")
        asked = dict(params or {})
        rows: list[Mapping[str, Any]] = []
        about: dict[str, Any] = {}
        seen: set[str] = set()
        while True:
            asked["limit"] = min(limit - len(rows), _PAGE)
            answer = self._transport.get(path, asked)
            if not isinstance(answer, dict) or not isinstance(answer.get("rows"), list):
                raise StagescopeError(
                    f"{path} answered without rows",
                    advice="bring service and client to versions that belong together",
                )
            rows += answer["rows"]
            following = answer.get("next")
            about = about or {n: v for n, v in answer.items() if n not in ("rows", "next")}
            if "whole" in about:
                about["whole"] = nonfinite.numbers(about["whole"])
            # A page that leads to itself would never end.
            if following is None or len(rows) >= limit or following in seen:
                break
            seen.add(following)
            asked["cursor"] = following
        return Table.from_rows(
            rows[:limit],
            order=order,
            columns=columns,
            title=title,
            about=about,
            truncated=following is not None or len(rows) > limit,
        )

    def _noticed(
        self, path: str, params: Mapping[str, Any], title: str, order: Sequence[str], limit: int
    ) -> FindingRows:
        """Return the rows of a list and of its groups."""
        rows, groups = (
            self.table(each, params, title=title, order=first, columns=COLUMNS[noun], limit=limit)
            for each, first, noun in (
                (path, order, title),
                (f"{path}/groups", GROUP_ORDER, f"{title}/groups"),
            )
        )
        return FindingRows.of_answers(rows, groups)

    def _patiently(self, path: str, body: Any, wait: float) -> Any:
        """Ask a long question again until it is answered, for `wait` seconds at most."""
        deadline = time.monotonic() + wait
        while True:
            try:
                return self._transport.ask(path, body, patient=False)
            except NotReady:  # noqa: PERF203 - it is being computed
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_ASK_AGAIN)


def segment(text: object, argument: str = "name") -> str:
    """Return a name as one segment of a path; raises `InvalidInput` for what is none."""
    if not isinstance(text, str) or text in ("", ".", ".."):
        raise InvalidInput(f"{argument} is {text!r:.100}, which is not a name", expected="a text")
    return quote(text, safe="")


def step_word(step: Any) -> str:
    """Return a step as a path names it; raises `InvalidInput` for what is none."""
    if step == "latest":
        return "latest"
    if isinstance(step, int) and not isinstance(step, bool):
        if abs(step) < _STEPS_END:
            return str(step)
        raise InvalidInput(f"step is {step!r:.50}", expected="an int of at most 18 digits")
    raise InvalidInput(f"step is {step!r}", expected="an int, 'latest', 'measured' or 'captured'")
