"""The methods of `Session` that compare attempts, steps and dumps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from stagescope.comparison_report import Changes, ComparisonReport
from stagescope.connection import LIMIT, Connection
from stagescope.operators import Divergence
from stagescope.table import Table
from stagescope.transport import given
from stagescope_wire import render
from stagescope_wire.errors import InvalidInput
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.render import wrapped

DumpSide: TypeAlias = Mapping[str, str | int]
"""One side of a comparison of dumps, with the fields of `stagescope.operators.SIDE_FIELDS`."""
Side: TypeAlias = str | Mapping[str, str]
"""`run[@attempt][:step]`, or `{"directory": path}`."""

ORDER: Final = (
    "name", "cosine", "max_abs_error", "max_relative_error", "euclidean_distance",
    "share_within_1e-3", "share_within_5e-3", "dtype_a", "shape_a", "dtype_b", "shape_b",
)  # fmt: skip

_NUMBERS: Final = {
    "cosine": "cosine", "max_abs_error": "max abs", "max_relative_error": "max rel",
    "share_within_1e-3": "in 1e-3", "share_within_5e-3": "in 5e-3",
}  # fmt: skip
_TENSOR: Final = 24
_NUMBER: Final = 10


class Tensors(Table):
    """One row per tensor that both dumps hold, in execution order; `a` is msprobe's NPU side.

    Usage:
        >>> tensors = session.tensors({"step": 5, "rank": 0}, {"rank": 1})
        >>> tensors.to_pandas().sort_values("cosine")
    """

    __slots__ = ()

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return each tensor's name and numbers as lines of at most `width` columns."""
        shown = self[:rows]
        titles = "".join(f"{title:>{_NUMBER}}" for title in _NUMBERS.values())
        head = wrapped("  ", f"{'tensor':<{_TENSOR}}{titles}", width)
        lines = head if len(shown) else ["(no tensors)"]
        for row in shown:
            other = "" if row["name_b"] in (None, row["name"]) else f" (b: {row['name_b']})"
            lines += wrapped("", f"{row['name']}{other}", width)
            numbers = "".join(f"{_number(row[name]):>{_NUMBER}}" for name in _NUMBERS)
            lines += wrapped("  ", f"{_tensor(row):<{_TENSOR}}{numbers}", width)
        rest = (self.about.get("count") or 0) - len(shown)
        return [*lines, f"... {rest} more tensors"] if rest > 0 else lines


def _tensor(row: JsonObject) -> str:
    sides = (f"{row[f'dtype_{side}'] or ''}{row[f'shape_{side}'] or ''}" for side in "ab")
    return " / ".join(dict.fromkeys(side.replace(" ", "") or render.MISSING for side in sides))


def _number(value: float | None) -> str:
    return render.MISSING if value is None else f"{value:.4g}"


class ComparisonRequests(Connection):
    """Comparisons of attempts by fingerprint, of steps by tensors and of dumps by operators."""

    def diff(self, a: str, b: str) -> Changes:
        """Return what changed between two attempts or runs, each named `run[@attempt]`.

        It compares their fingerprints (git, configuration, packages, drivers, environment) and the
        placement of their ranks; changes that may change numbers come first. The default attempt is
        the run's newest.

        Raises:
            NotFound: there is no such run or attempt.
        """
        return Changes.from_table(self.table("/diff", {"a": a, "b": b}, noun="diff"))

    def compare(
        self, a: Side, b: Side, c: Side | None = None, *, tolerances: Sequence[str] = (),
        wait: float = 900.0, on_wait: Callable[[str], object] = lambda text: None,
    ) -> ComparisonReport:  # fmt: skip
        """Compare the kept tensors of two or three steps, attempts or runs.

        Args:
            a, b, c: `run[@attempt][:step]` (without a step: all steps that every side still has),
                or `{"directory": path}` on the service's machine.
            tolerances: `PATTERN=ATOL[,RTOL]`: more differences that count as noise.
            wait: seconds to wait for the answer.
            on_wait: called with how far the service is, every few seconds.

        Raises:
            NotFound: there is no such run or step, or none of its tensors are kept.
            NotReady: the comparison did not finish in time; the call may be repeated.
        """
        body = {"a": a, "b": b, "c": c, "tolerances": [*tolerances]}
        answer = self._poll("/comparisons", body, wait, on_wait)
        return ComparisonReport(answer, save=functools.partial(self._save_page, body, wait))

    def _save_page(self, request: JsonObject, wait: float, path: Path) -> None:
        sides = {name: request[name] for name in ("a", "b", "c")}
        if not all(isinstance(side, str | None) for side in sides.values()):
            raise InvalidInput("a page is made of runs only", expected="RUN[@ATTEMPT][:STEP]")
        params = {**sides, "tolerances": ";".join(request["tolerances"]) or None}
        with path.open("wb") as file:
            self._transport.download(
                "/comparisons/page", params, lambda chunk, _: file.write(chunk), timeout=wait
            )

    def divergence(
        self, a: DumpSide, b: DumpSide, *, factor: float | None = None,
        by_dtype: Mapping[str, float] | None = None, exact: bool = False,
        skip_sharded: bool = False, shards: Sequence[str] = (), limit: int | None = None,
    ) -> Divergence:  # fmt: skip
        """Return the first operator, parameter and gradient in which two dumps differ.

        Args:
            a, b: run, attempt, step, stage, role, rank, part, capture_id; `b` inherits missing
                fields from `a`. `ranks` ("all", "0-3") instead of `rank` puts the tensors of
                several ranks together, with the layout that they reported or `layout` ("dp2tp2").
            factor: threshold in eps of the coarsest dtype up to that operator; default: 4, 100
                between devices of two kinds, and 8 (float32: 100) between layouts.
            by_dtype: dtype -> threshold of the relative difference; replaces `factor`.
            exact: every number must be equal.
            skip_sharded: skip tensors whose shard differs by rank.
            shards: `PATTERN=AXIS:HOW`: how tensors whose NAME.SECTION.INDEX matches are put
                together; HOW is a dimension from 0, `sum`, `mean`, `same` or `skip`.
            limit: most differing rows in the answer; all are counted.

        Usage:
            >>> session.divergence({"step": 5, "rank": 0}, {"rank": 1})
            >>> session.divergence({"step": 5, "rank": 0, "attempt": 1}, {"attempt": 2})
            >>> session.divergence({"run": "tp2", "step": 5, "ranks": "all"}, {"run": "tp1"})
        """
        body = given(
            a=dict(a), b=dict(b), factor=factor, exact=exact, skip_sharded=skip_sharded,
            by_dtype=None if by_dtype is None else dict(by_dtype), shards=[*shards], limit=limit,
        )  # fmt: skip
        return Divergence.from_answer(self._transport.query("/operators/divergence", body))

    def tensors(
        self, a: DumpSide, b: DumpSide, *, limit: int = LIMIT, wait: float = 900.0
    ) -> Tensors:
        """Return the differences of the full tensors of two dumps (task `tensor`), by msprobe.

        Args:
            a, b: as in `divergence`.
            limit: most rows; `about["count"]` is the number of all rows.
            wait: seconds to wait; msprobe compares some hundred tensors per second.

        Raises:
            NotReady: msprobe did not finish in time; the call may be repeated.
        """
        body = {"a": dict(a), "b": dict(b), "limit": limit}
        answer = self._poll("/operators/tensors", body, wait)
        about = {name: value for name, value in answer.items() if name != "rows"}
        table = Table.from_rows(answer["rows"], order=ORDER, title="tensors", about=about)
        return Tensors.from_table(table)
