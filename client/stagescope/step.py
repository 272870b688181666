"""`Step`: what the service knows about one step, a method a question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from stagescope.answers import Metrics
from stagescope.frames import Table

if TYPE_CHECKING:
    from stagescope.session import Session

LIMIT: Final = 1000
"""Rows of a table unless `limit` says otherwise."""

# Columns that are shown first: a table in 80 columns leaves out the last.
_TOKEN_ORDER: Final = ("abs_diff", "p", "q", "round", "token_id", "sample_uid", "position", "rank")
_STAGE_ORDER: Final = ("stage", "role", "rank", "part", "status", "seconds", "begin_wall")
_DUMP_ORDER: Final = ("stage", "role", "rank", "state", "bytes", "path")
_SCALAR_ORDER: Final = ("name", "value", "stage", "role", "rank")


class Step:
    """One step of one attempt of one run: a method a question."""

    def __init__(
        self, session: Session, step: int, *, run: str | None, attempt: int | None
    ) -> None:
        self._session = session
        self.step = step
        self.run = run
        self.attempt = attempt

    def __repr__(self) -> str:
        return f"<stagescope.Step {self.step} of run {self.run}, attempt {self.attempt}>"

    def metrics(
        self,
        *,
        rank: int | None = None,
        stage: str | None = None,
        round: int | None = None,
    ) -> Metrics:
        """Return the step's metrics: of the whole, or of one rank, stage or round.

        Raises:
            NotFound: nothing was measured there.
        """
        return Metrics.from_answer(
            self._session.get(
                self._path("metrics"), **self._params(rank=rank, stage=stage, round=round)
            )
        )

    def rounds(
        self, *, stage: str | None = None, rank: int | None = None, limit: int = LIMIT
    ) -> Table:
        """Return the mismatch round by round."""
        return self._table("rounds", ("round",), limit, stage=stage, rank=rank)

    def ranks(self, *, stage: str | None = None, limit: int = LIMIT) -> Table:
        """Return the mismatch rank by rank, with where each rank ran."""
        return self._table("ranks", ("stage", "role", "rank"), limit, stage=stage)

    def tokens(
        self,
        *,
        stage: str | None = None,
        rank: int | None = None,
        round: int | None = None,
        limit: int = LIMIT,
    ) -> Table:
        """Return the worst tokens, the largest |old - rollout| first."""
        return self._table("tokens", _TOKEN_ORDER, limit, stage=stage, rank=rank, round=round)

    def stages(
        self, *, stage: str | None = None, rank: int | None = None, limit: int = LIMIT
    ) -> Table:
        """Return who was in which stage, when, and who has not arrived."""
        return self._table("stages", _STAGE_ORDER, limit, stage=stage, rank=rank)

    def dumps(
        self, *, stage: str | None = None, rank: int | None = None, limit: int = LIMIT
    ) -> Table:
        """Return msprobe's dumps: place, size and state."""
        return self._table("dumps", _DUMP_ORDER, limit, stage=stage, rank=rank)

    def scalars(
        self, *, stage: str | None = None, rank: int | None = None, limit: int = LIMIT
    ) -> Table:
        """Return the scalars that ranks handed over."""
        return self._table("scalars", _SCALAR_ORDER, limit, stage=stage, rank=rank)

    def _table(self, noun: str, order: Sequence[str], limit: int, **params: Any) -> Table:
        return self._session.table(
            self._path(noun), self._params(**params), title=noun, order=order, limit=limit
        )

    def _path(self, noun: str) -> str:
        return f"/steps/{self.step}/{noun}"

    def _params(self, **params: Any) -> dict[str, Any]:
        return {"run": self.run, "attempt": self.attempt, **params}
