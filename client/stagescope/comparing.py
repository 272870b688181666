"""Two or more things of one kind held against each other."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stagescope.asking import LIMIT, Asking
from stagescope.changes import CHANGE_ORDER, Changes
from stagescope.compared import Compared
from stagescope.errors import InvalidInput
from stagescope.frames import Table
from stagescope.operators import Divergence
from stagescope.tensors import ORDER, Tensors


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
