"""`Connection`: the HTTP calls to one service, and its answers as tables.

`Session` and its groups of methods build on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import quote

from stagescope.convert import COLUMNS, Kinds
from stagescope.findings import GROUP_ORDER, FindingRows
from stagescope.link_text import session_call
from stagescope.plotting import figure_of, graph_objects
from stagescope.table import Table
from stagescope.transport import Params, QueryValue, Transport
from stagescope_wire import discovery, nonfinite
from stagescope_wire.errors import (
    CatalogueUnavailable,
    InvalidInput,
    NotReady,
    StagescopeError,
    Unreachable,
)
from stagescope_wire.links import LinkText
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.schema import STEP_BOUND

if TYPE_CHECKING:
    import plotly.graph_objects
    from typing_extensions import Self

OptStr: TypeAlias = str | None
OptInt: TypeAlias = int | None
LIMIT: Final = 1000
"""Most rows of a table unless `limit` is given."""

_PAGE_ROWS: Final = 500
_POLL_INTERVAL: Final = 0.5
"""Seconds between two requests for something that the service is still computing."""


ORDERS: Final[Mapping[str, Sequence[str]]] = {
    "runs": ("run", "display_name", "live", "attempt", "last_closed_step", "last_wall"),
    "attempts": ("attempt", "state", "end_reason", "first_step", "last_closed_step",
                 "resumed_from_step", "begun", "ended"),
    "steps": ("step", "attempt", "complete", "measured", "gap", "begun_again", "lost",
              "superseded_by", "missing"),
    "engines": ("name", "state", "age_seconds", "kind", "url", "model", "used_by"),
    "versions": ("version", "step", "differ", "missing", "replicas_differ", "not_comparable",
                 "agree", "complete"),
    "weights": ("name", "verdict", "ranks", "odd_ranks", "dtype", "shape", "reason"),
    "canary": ("version", "step", "source", "verdict", "causes", "pairs", "problem", "seconds"),
    "canary_scores": ("pair", "source", "sequence", "verdict", "mean", "max", "tokens",
                      "position", "token_id", "first", "second"),
    "devices": ("device", "odd", "suspected", "runs", "last_run", "last_step", "last_rank"),
    "diagnosis": ("verdict", "sure", "rule", "since_step", "where", "title", "family"),
    "diff": ("weight", "area", "name", "a", "b"),
    "rounds": ("round", "turn", "staleness", "tokens", "nonfinite", "abs_diff_mean", "abs_diff_max",
               "comparable", "cause", "k3_kl"),
    "ranks": ("role", "rank", "tokens", "nonfinite", "abs_diff_mean", "abs_diff_max", "comparable",
              "cause", "k3_kl", "parts"),
    "tokens": ("text", "token_id", "abs_diff", "p", "q", "round", "sample_uid", "position",
               "rank"),
    "samples": ("sample_uid", "max_abs", "mean_abs", "tokens", "rounds", "reward", "rank",
                "nonfinite"),
    "loss": ("fate", "tokens", "share_of_tokens", "share_of_mismatch", "mean_abs", "gradient"),
    "stages": ("stage", "role", "rank", "part", "status", "seconds", "open_seconds",
               "waited_seconds"),
    "dumps": ("stage", "role", "rank", "state", "bytes", "path"),
    "kept": ("stage", "role", "rank", "part", "sections", "bytes", "state", "path"),
    "operators": ("order", "name", "section", "index", "dtype", "shape", "min", "max", "mean",
                  "norm", "non_finite", "source"),
    "non_finite": ("rank", "name", "section", "index", "non_finite", "source", "earliest"),
    "scalars": ("name", "value", "stage", "role", "rank"),
    "stuck": ("rank", "status", "step", "stage", "seconds", "ranks_begun", "ranks",
              "usual_seconds", "ranks_ended", "role", "process", "host", "pid", "limit_seconds"),
}  # fmt: skip
"""Table -> the columns that are shown first: in 80 columns a table leaves out the last ones."""

_TITLES: Final = {"losses": "lost data", "loss": "gradient"}
"""Table -> its title, where it is not the table's name."""


class Connection:
    """A connection to one service; safe to use from several threads."""

    def __init__(
        self, location: discovery.ServiceLocation, *, timeout: float = 10.0,
        link_text: LinkText = session_call, on_close: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._location = location
        self._on_close = on_close
        self._link_text = link_text
        self._transport = Transport(location, timeout=timeout, link_text=link_text)

    @property
    def url(self) -> str:
        """The service's URL."""
        return self._location.url

    def environment(self) -> dict[str, str]:
        """Return the variables with which another process connects as this session does."""
        token = self._location.operate_token or self._location.read_token
        return {
            "STAGESCOPE_URL": self.url,
            **({} if token is None else {"STAGESCOPE_TOKEN": token}),
        }

    def close(self) -> None:
        """Close the connections; the session cannot be used afterwards."""
        self._transport.close()
        self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<stagescope.Session {self.url}, found by {self._location.found}>"

    def check(self) -> None:
        """Check that the service answers and accepts the token.

        Raises:
            Unreachable: nothing answers, or another server does.
            Unauthorized: there is no token, or the service does not accept it.
        """
        alive = self._transport.get("/healthz", retry=False)
        if not isinstance(alive, dict):
            raise Unreachable(
                f"the server at {self.url} is not a stagescope service", advice="check the URL"
            )
        try:
            self._transport.get("/runs", {"limit": 1}, retry=False)
        except (NotReady, CatalogueUnavailable):
            # The service runs but is not ready; a later call waits for it until its own deadline.
            return

    def get(self, path: str, **params: QueryValue) -> Json:
        """Return the JSON that a route answers; a query parameter of None is left out."""
        return self._transport.get(path, params)

    def figure(self, name: str, **parameters: QueryValue) -> plotly.graph_objects.Figure:
        """Return a figure that the service draws, as plotly's; its numbers are in it.

        Usage:
            >>> session.figure("distribution", step=5, of="ratio")

        Args:
            name: one of `session.figures()`.
            parameters: its query parameters; None is left out.

        Raises:
            MissingExtra: plotly is not installed.
            NotFound: there is no such figure, run or step.
        """
        graph_objects()  # without plotly nothing is requested
        return figure_of(self.get(f"/figures/{segment(name)}", **parameters))

    def download(
        self, path: str, params: Params, write: Callable[[bytes, int], object], *, timeout: float
    ) -> None:
        """Pass the bytes of a route's answer to `write` in chunks; see `Transport.download`."""
        self._transport.download(path, params, write, timeout=timeout)

    def table(
        self, path: str, params: Params | None = None, *, noun: str = "", title: str | None = None,
        order: Sequence[str] = (), columns: Kinds = MappingProxyType({}), limit: int = LIMIT,
    ) -> Table:  # fmt: skip
        """Return the rows of a route, following its pages up to `limit` rows.

        Args:
            path, params: of the route.
            noun: what the rows are: its ORDERS and its columns (`convert.COLUMNS`) are used.
            title: of the table; default: the noun.
            order: the columns that are shown first, instead of the noun's.
            columns: further columns that every row has.
            limit: most rows.
        """
        if limit < 1:
            raise InvalidInput(f"limit is {limit}", expected="a number of rows from 1")
        query = dict(params or {})
        rows: list[JsonObject] = []
        about: dict[str, Json] = {}
        seen: set[str] = set()
        while True:
            query["limit"] = min(limit - len(rows), _PAGE_ROWS)
            answer = self._transport.get(path, query)
            if not isinstance(answer, dict) or not isinstance(answer.get("rows"), list):
                raise StagescopeError(
                    f"{path} answered without rows",
                    advice="install versions of service and client that belong together",
                )
            rows += answer["rows"]
            following = answer.get("next")
            about = about or {n: v for n, v in answer.items() if n not in ("rows", "next")}
            if "whole" in about:
                about["whole"] = nonfinite.numbers(about["whole"])
            # A page that links to an earlier page would make this loop endless.
            if following is None or len(rows) >= limit or following in seen:
                break
            seen.add(following)
            query["cursor"] = following
        return Table.from_rows(
            rows[:limit],
            order=order or ORDERS.get(noun, ()),
            columns={**columns, **COLUMNS.get(noun, {})},
            title=_TITLES.get(noun, noun) if title is None else title,
            about=about,
            truncated=following is not None or len(rows) > limit,
        )

    def _findings_table(
        self, path: str, params: Params, title: str, order: Sequence[str], limit: int
    ) -> FindingRows:
        """Return the rows of `path` together with those of its `/groups`."""
        rows = self.table(path, params, noun=title, order=order, limit=limit)
        groups = self.table(
            f"{path}/groups", params, noun=f"{title}/groups", title=_TITLES.get(title, title),
            order=GROUP_ORDER, limit=limit,
        )  # fmt: skip
        return FindingRows.of_answers(rows, groups, link_text=self._link_text)

    def _poll(
        self, path: str, body: JsonObject, wait: float,
        on_wait: Callable[[str], object] = lambda text: None,
    ) -> Json:  # fmt: skip
        """Repeat a slow POST until the service returns a result, for at most `wait` seconds.

        `on_wait` is called with what each answer says that is no result yet.
        """
        deadline = time.monotonic() + wait
        while True:
            try:
                return self._transport.query(path, body, retry=False)
            except NotReady as error:  # noqa: PERF203 - the service is still computing the answer
                if time.monotonic() >= deadline:
                    raise
                on_wait(error.wrong)
                time.sleep(_POLL_INTERVAL)


def segment(text: object, argument: str = "name") -> str:
    """Return a name quoted as one path segment.

    Raises:
        InvalidInput: `text` is not a name.
    """
    if not isinstance(text, str) or text in ("", ".", ".."):
        raise InvalidInput(f"{argument} is {text!r:.100}, which is not a name", expected="a text")
    return quote(text, safe="")


def step_segment(step: object) -> str:
    """Return a step as a path segment.

    Raises:
        InvalidInput: `step` is neither an int nor such a word.
    """
    if step in ("latest", "measured", "captured"):
        return str(step)
    if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < STEP_BOUND:
        return str(step)
    raise InvalidInput(
        f"step is {step!r:.50}",
        expected="an int from 0 of at most 18 digits, 'latest', 'measured' or 'captured'",
    )
