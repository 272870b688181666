"""The reading side of the store: the queries of the API, in its own process.

Each method opens one read transaction, so its result is a consistent snapshot, and returns plain
dict rows whose keys are the columns of `tables`. A `Catalogue` is thread-safe and cannot write.
Methods that return lists document their order; most accept `limit`, some `offset`.

Filters are keyword arguments named after columns; None means no filter, a sequence any of its
values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import sqlalchemy as sa
from pydantic import Field

from stagescope_service.fields import Role, Row, Stage, Step
from stagescope_service.store import connect
from stagescope_service.store.queries import overview
from stagescope_service.store.queries.canary import CanaryQueries
from stagescope_service.store.queries.changes import ChangeQueries
from stagescope_service.store.queries.files import FileQueries
from stagescope_service.store.queries.findings import FindingQueries
from stagescope_service.store.queries.measurements import MeasurementQueries
from stagescope_service.store.queries.overview import Count
from stagescope_service.store.queries.reader import LIMIT, Filter, Reader, conditions
from stagescope_service.store.queries.removal import RemovalQueries
from stagescope_service.store.queries.rollouts import RolloutQueries
from stagescope_service.store.queries.runs import RunQueries
from stagescope_service.store.queries.sparklines import SparklineQueries
from stagescope_service.store.queries.weights import WeightQueries
from stagescope_service.store.snapshot import rows
from stagescope_service.store.tables import (
    TABLES,
    AuditEntry,
    CaptureRow,
    DumpRow,
    MetaRow,
    OperatorTableRow,
    RegisteredEngine,
)
from stagescope_service.store.tables.service import UNREAD_DUMP
from stagescope_wire.nonfinite import Json

_COSTS_OF: Final = 20_000
"""Newest dumps of a run that say what a capture costs."""


class DumpCost(Row):
    """The largest cost of one rank in one step, over the newest complete dumps of this kind."""

    role: Role
    stage: Stage
    task: Annotated[str | None, Field(examples=["statistics"])]
    """msprobe's task of these dumps; null: not known."""
    level: str | None
    """msprobe's level of these dumps; null: not known."""
    bytes: int
    """Size in bytes of the rank's dumps of one step."""
    seconds: float | None
    """Seconds that the step took longer; null: not measured."""
    step: Step
    """The trainer's step of the newest of these dumps."""


class CostOfAttempt(DumpCost):
    """A cost, and the newest attempt that has such a dump."""

    attempt_id: int


class CaptureQueries(Reader):
    """Queries for captures, dumps and operators."""

    def captures(self, *, run: Filter = None) -> list[CaptureRow]:
        """Return captures, the most recently requested first, including removed ones."""
        where = conditions("captures", run=run)
        return self._page(CaptureRow, "captures", where, "-created_wall capture_id")

    def capture(self, capture_id: str) -> CaptureRow | None:
        """Return one capture, or None."""
        return self._one(CaptureRow, "captures", capture_id=capture_id)

    def captured(self, capture_id: str, *, limit: int = LIMIT) -> list[DumpRow]:
        """Return the dumps of a capture, by attempt, step, stage, role and rank."""
        return self._page(
            DumpRow,
            "dumps",
            [TABLES["dumps"].c.capture_id == capture_id, TABLES["dumps"].c.step.is_not(None)],
            "attempt_id step stage role rank occurrence epoch minibatch microbatch incarnation",
            limit,
        )

    def count_unread_dumps(self, capture_id: str) -> int:
        """Return the number of a capture's dumps whose operators are not read yet."""
        table = TABLES["operators"].c
        of_capture = table.capture_id == capture_id
        [count] = self._values(sa.select(sa.func.count()).where(of_capture, sa.text(UNREAD_DUMP)))
        return count

    def dumps(
        self,
        attempt_id: Filter = None,
        step: Filter = None,
        *,
        capture_id: Filter = None,
        limit: int = LIMIT,
    ) -> list[DumpRow]:
        """Return msprobe dumps by step, stage and rank, in every state."""
        where = conditions("dumps", attempt_id=attempt_id, step=step, capture_id=capture_id)
        return self._page(DumpRow, "dumps", where, "step stage role rank work_key", limit)

    def dump_costs(self, attempt_id: Sequence[int]) -> list[CostOfAttempt]:
        """Return what complete dumps of attempts cost a rank in a step, by role and stage."""
        table = TABLES["dumps"].c
        newest = (
            sa.select(*TABLES["dumps"].c)
            .where(table.attempt_id.in_(attempt_id), table.step.is_not(None))
            .where(table.state == "complete", table.bytes.is_not(None))
            .order_by(table.attempt_id.desc(), table.step.desc())
            .limit(_COSTS_OF)
            .subquery()
            .c
        )
        kind = ("role", "stage", "task", "level")
        step = ("attempt_id", "step", "rank", "capture_id")
        of_rank = (
            sa.select(
                *(newest[name] for name in (*kind, *step)),
                sa.func.sum(newest.bytes).label("bytes"),
                sa.func.sum(newest.seconds).label("seconds"),
            )
            .group_by(*(newest[name] for name in (*kind, *step)))
            .subquery()
            .c
        )
        found = self._rows(
            CostOfAttempt,
            sa.select(
                *(of_rank[name] for name in (*kind, "attempt_id")),
                *(sa.func.max(of_rank[name]).label(name) for name in ("bytes", "seconds", "step")),
            )
            .group_by(*(of_rank[name] for name in (*kind, "attempt_id")))
            .order_by(of_rank.role, of_rank.stage, of_rank.attempt_id.desc()),
        )
        largest: dict[tuple[str, str, str | None, str | None], CostOfAttempt] = {}
        for row in found:  # of each kind, the newest attempt is first
            first = largest.setdefault((row["role"], row["stage"], row["task"], row["level"]), row)
            first["bytes"] = max(first["bytes"], row["bytes"])
            both = (first["seconds"], row["seconds"])
            first["seconds"] = max((each for each in both if each is not None), default=None)
        return [*largest.values()]

    def operators(
        self, attempt_id: Filter = None, step: Filter = None, *, limit: int = LIMIT
    ) -> list[OperatorTableRow]:
        """Return the operator tables of dumps, the earliest dump first."""
        where = conditions("operators", attempt_id=attempt_id, step=step)
        order = "step announced_wall role rank work_key capture_id incarnation"
        return self._page(OperatorTableRow, "operators", where, order, limit)

    def operator_steps(self, attempt_id: int, *, limit: int = 8) -> list[int]:
        """Return the newest steps of an attempt that have operators, newest first.

        A dump that is known to hold no call, such as the last one of an engine, has none.
        """
        table = TABLES["operators"]
        of_attempt = (table.c.attempt_id == attempt_id) & table.c.step.is_not(None)
        has_calls = sa.func.coalesce(table.c.calls, 1) > 0
        query = sa.select(table.c.step).where(of_attempt & has_calls).distinct()
        return self._values(query.order_by(table.c.step.desc()).limit(limit))


class Catalogue(
    RunQueries,
    MeasurementQueries,
    SparklineQueries,
    RolloutQueries,
    WeightQueries,
    CanaryQueries,
    CaptureQueries,
    FindingQueries,
    FileQueries,
    ChangeQueries,
    RemovalQueries,
):
    """Read the catalogue at `url` (the URL that `SqlStore` writes).

    The queries are in `queries`, one file per noun; those about the service itself are here.

    Raises:
        CatalogueUnavailable: by every method, if no catalogue of this version can be read at the
            moment. The next call tries again.
    """

    def check(self) -> None:
        """Raise `CatalogueUnavailable` unless a catalogue of this version exists."""
        with self._reading() as connection:
            connect.check_revision(connection, f"catalogue {self._where}")

    def engines(self) -> list[RegisteredEngine]:
        """Return the registered engines, by name."""
        return self._page(RegisteredEngine, "engines", [], "name")

    def audit(self, *, limit: int = LIMIT, offset: int = 0) -> list[AuditEntry]:
        """Return the audit log, the newest entry first."""
        return self._page(AuditEntry, "audit", [], "-audit_id", limit, offset)

    def meta(self, key: str) -> Json:
        """Return the value of a key of the table `meta`, or None."""
        row = self._one(MetaRow, "meta", key=key)
        return row and row["value"]

    def counts(self) -> dict[str, list[Count]]:
        """Return the Prometheus metrics, each as rows of labels and a `count`; see `overview`."""
        with self._reading() as connection:
            queries = overview.counts()
            return {name: rows(Count, connection, query) for name, query in queries.items()}

    def bytes_on_disk(self) -> int | None:
        """Return the bytes of the catalogue's files; None if a database server holds them."""
        if self._path is None:
            return None
        files = (self._path, self._path.with_name(self._path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())
