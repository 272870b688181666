"""Two or more things of one kind held against each other."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stagescope import render
from stagescope.asking import LIMIT, Asking
from stagescope.changes import CHANGE_ORDER, Changes
from stagescope.compared import Compared
from stagescope.frames import Table
from stagescope.operators import Divergence
from stagescope.render import wrapped
from stagescope.wire.errors import InvalidInput

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
    """A row a tensor that both dumps hold, in execution order; `a` is msprobe's NPU side.

    Usage:
        >>> tensors = session.tensors({"step": 5, "rank": 0}, {"rank": 1})
        >>> tensors.to_pandas().sort_values("cosine")
    """

    __slots__ = ()

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return each tensor's name and numbers as lines of at most `width` columns."""
        shown = [self[at] for at in range(len(self) if rows is None else min(rows, len(self)))]
        words = "".join(f"{word:>{_NUMBER}}" for word in _NUMBERS.values())
        head = wrapped("  ", f"{'tensor':<{_TENSOR}}{words}", width)
        lines = head if shown else ["(no tensors)"]
        for row in shown:
            other = "" if row["name_b"] in (None, row["name"]) else f" (b: {row['name_b']})"
            lines += wrapped("", f"{row['name']}{other}", width)
            numbers = "".join(f"{_number(row[name]):>{_NUMBER}}" for name in _NUMBERS)
            lines += wrapped("  ", f"{_tensor(row):<{_TENSOR}}{numbers}", width)
        left = (self.about.get("count") or 0) - len(shown)
        return [*lines, f"... {left} more tensors"] if left > 0 else lines


def _tensor(row: dict[str, Any]) -> str:
    sides = (f"{row[f'dtype_{side}'] or ''}{row[f'shape_{side}'] or ''}" for side in "ab")
    return " / ".join(dict.fromkeys(side.replace(" ", "") or render.MISSING for side in sides))


def _number(value: float | None) -> str:
    return render.MISSING if value is None else f"{value:.4g}"


class Comparing(Asking):
    """Attempts by their fingerprints, steps by their tensors, dumps by their operators."""

    def diff(self, a: str, b: str) -> Changes:
        """Return what changed between two attempts or runs, `run[@attempt]` each.

        Their fingerprints (git, configuration, packages, drivers, environment) and where each
        rank ran, what decides numbers first. Without an attempt: the run's newest.

        Raises:
            NotFound: no such run or attempt.
        """
        params = {"a": a, "b": b}
        return Changes.of(self.table("/diff", params, title="diff", order=CHANGE_ORDER))

    def compare(
        self,
        a: str | Mapping[str, Any],
        b: str | Mapping[str, Any],
        c: str | Mapping[str, Any] | None = None,
        *,
        tolerances: Sequence[str] = (),
        wait: float = 900.0,
    ) -> Compared:
        """Hold what is kept of two or three steps, attempts or runs against each other.

        Args:
            a, b, c: `run[@attempt][:step]` (without a step: all that every side still holds), or
                `{"directory": path}` on the service's machine.
            tolerances: `PATTERN=ATOL[,RTOL]`: what counts as noise, beside the defaults.
            wait: seconds.

        Raises:
            NotFound: no such run or step, or nothing of it is kept.
            NotReady: it was not done in time; the same may be asked again.
        """
        body = {"a": a, "b": b, "c": c, "tolerances": [*tolerances]}
        answer = self._patiently("/comparisons", body, wait)
        return Compared(answer, save=functools.partial(self._save_page, body, wait))

    def _save_page(self, asked: Mapping[str, Any], wait: float, path: Path) -> None:
        sides = {name: asked[name] for name in ("a", "b", "c")}
        if not all(isinstance(side, str | None) for side in sides.values()):
            raise InvalidInput("a page is made of runs only", expected="RUN[@ATTEMPT][:STEP]")
        params = {**sides, "tolerances": ";".join(asked["tolerances"]) or None}
        with path.open("wb") as file:
            self._transport.download(
                "/comparisons/page", params, lambda piece, _: file.write(piece), timeout=wait
            )

    def divergence(
        self,
        a: Mapping[str, Any],
        b: Mapping[str, Any],
        *,
        factor: float | None = None,
        by_dtype: Mapping[str, float] | None = None,
        exact: bool = False,
        skip_sharded: bool = False,
        limit: int | None = None,
    ) -> Divergence:
        """Return the first operator, parameter and gradient in which two dumps differ.

        Args:
            a, b: run, attempt, step, stage, role, rank, part, capture_id; what `b` leaves out is
                as in `a`.
            factor: threshold in eps of the coarsest dtype up to there; the service takes 4, and
                100 where the devices are of two kinds.
            by_dtype: dtype -> threshold of the relative difference, in the place of that.
            exact: every number must be equal.
            skip_sharded: leave out tensors of which each rank holds another shard.
            limit: most rows that differ in the answer; all are counted.

        Usage:
            >>> session.divergence({"step": 5, "rank": 0}, {"rank": 1})
            >>> session.divergence({"step": 5, "rank": 0, "attempt": 1}, {"attempt": 2})
        """
        body = {
            "a": dict(a), "b": dict(b), "factor": factor, "exact": exact,
            "by_dtype": None if by_dtype is None else dict(by_dtype),
            "skip_sharded": skip_sharded, "limit": limit,
        }  # fmt: skip
        said = {name: value for name, value in body.items() if value is not None}
        return Divergence.from_answer(self._transport.ask("/operators/divergence", said))

    def tensors(
        self, a: Mapping[str, Any], b: Mapping[str, Any], *, limit: int = LIMIT, wait: float = 900.0
    ) -> Tensors:
        """Return how the full tensors of two dumps (task `tensor`) differ, compared by msprobe.

        Args:
            a, b: as in `divergence`.
            limit: most rows; `about["count"]` says how many there are.
            wait: seconds; msprobe takes one for some hundred tensors.

        Raises:
            NotReady: msprobe was not done in time; the same may be asked again.
        """
        body = {"a": dict(a), "b": dict(b), "limit": limit}
        answer = self._patiently("/operators/tensors", body, wait)
        about = {name: value for name, value in answer.items() if name != "rows"}
        found = Table.from_rows(answer["rows"], order=ORDER, title="tensors", about=about)
        return Tensors.of(found)
