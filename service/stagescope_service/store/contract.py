"""The contract of the store: its guarantees to the coordinator, independent of the database.

The coordinator submits the values of rows (`Put`) and gets a future, which is resolved once they
are on disk. Rows have natural primary keys and a `Put` names the columns that it sets, so writes
are idempotent: resubmitting one has the same outcome.

The reading side is `catalogue.Catalogue`, which other processes use; the coordinator reads once, at
its start, with `snapshot()`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from stagescope_wire.nonfinite import Json

if TYPE_CHECKING:  # `core` has no SQLAlchemy
    from stagescope_service.store.tables import (
        AttemptRow,
        CaptureRow,
        DumpRow,
        FindingRow,
        OperatorTableRow,
        PayloadRow,
        ProcessRow,
        RunRow,
        StackRow,
        StageRow,
        StepColumns,
    )


@dataclasses.dataclass(slots=True)  # a named tuple takes twice as long to make
class Put:
    """Upsert: `row` holds the full primary key and the columns to set; others are unchanged."""

    table: str
    row: Mapping[str, Any]


class Delete(NamedTuple):
    """Delete every row whose columns equal `where`; an empty `where` is an error."""

    table: str
    where: Mapping[str, object]


class RemoveRows(NamedTuple):
    """Delete rows of a step, at most `limit`, from the tables in `tables.STEP_ROWS`.

    Other rows remain: the step's own row with its summary, its metrics, findings, losses, dumps,
    and files that still exist.
    """

    attempt_id: int
    step: int
    limit: int

    @property
    def table(self) -> str:
        """The table of the step."""
        return "steps"


class RemoveRun(NamedTuple):
    """Delete rows of a run, at most `limit`; its attempts only after all others.

    Its own row stays, and so do rows that other runs use too: texts, clocks, names of weights.
    """

    run: str
    attempt_ids: tuple[int, ...]
    limit: int

    @property
    def table(self) -> str:
        """The table of the run."""
        return "runs"


Write = Put | Delete | RemoveRows | RemoveRun


class RefusedWrite(NamedTuple):
    """A write that the catalogue can never accept, and the reason."""

    write: Write
    reason: str


Submitted: TypeAlias = "Future[Sequence[RefusedWrite]]"
"""Resolved after the commit, with the writes that were left out."""

WriteRows = Callable[[Sequence[Write]], Awaitable[None]]
"""Commits rows; returns after the commit."""


class Health(NamedTuple):
    """Whether writes currently succeed, and if not, the reason and advice."""

    healthy: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """The state with which a coordinator continues after its predecessor; plain rows by table.

    * `runs`, `attempts`, `captures`: all of them (including removed captures).
    * `processes`: all that neither finished nor lapsed, or have a payload in state 'announced'.
      Also all of attempts that have not ended or are the newest of their run.
    * `steps`: those not closed, and the last closed ones of each attempt; without their blobs.
    * `stages`: the open ones. In attempts that have not ended or are the newest of their run also
      those of these steps, and the unfinished ones without a step.
    * `unaggregated`: (attempt_id, step) of closed steps whose summary lacks parts ingested later.
    * `armed`: dumps that began and did not report an end.
    * `undigested`: `operators` of announced dumps whose operator table was not built since.
    * `asked_stacks`: `stacks` that were requested and not delivered.
    * `payloads`: those in state 'announced', and those of these steps in these attempts.
    * `findings`: all of each run's newest attempt, and all without an attempt.
    """

    runs: list[RunRow]
    attempts: list[AttemptRow]
    processes: list[ProcessRow]
    steps: list[StepColumns]
    stages: list[StageRow]
    payloads: list[PayloadRow]
    captures: list[CaptureRow]
    findings: list[FindingRow]
    last_attempt_id: int
    """The highest attempt_id ever assigned; 0 if none."""
    last_revision: int
    """The highest plan revision of any capture; 0 if none."""
    meta: dict[str, Json]
    unaggregated: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    armed: list[DumpRow] = dataclasses.field(default_factory=list)
    undigested: list[OperatorTableRow] = dataclasses.field(default_factory=list)
    asked_stacks: list[StackRow] = dataclasses.field(default_factory=list)


class Store(Protocol):
    """The writing side.

    **Durability.** A future is resolved without an error only after its rows are committed and
    on disk.

    **Order.** Submissions are applied in the order of the calls: if two set the same column of
    the same row, the later one wins.

    **Outage.** While the database cannot be written, nothing is discarded. Submissions stay queued,
    `health()` reports the reason, and writes are retried until they succeed or the store is closed.
    A lock, a full disk, a lost server, revoked privileges or a missing table may cause it.

    **Refusal.** A write whose values the database can never accept (a wrong type, a violated
    constraint, an unknown column) concerns its submission alone. The submission fails as a whole
    with `StoreError`. If it was submitted with `isolate`, its other writes are committed, and the
    future's result names the refused ones.

    **Thread safety.** `submit`, `health` and `snapshot` may be called from any thread.
    """

    def open(self) -> None:
        """Create the catalogue if there is none, and start writing; do nothing if already open.

        Raises:
            CatalogueUnavailable: it cannot be opened at the moment; the message has advice. The
                call may be repeated.
        """
        ...

    def submit(self, writes: Sequence[Write], *, isolate: bool = False) -> Submitted:
        """Queue writes to commit atomically; never waits for the disk.

        Args:
            writes: in the order in which they apply.
            isolate: leave out the writes that can never be accepted, instead of failing.
        """
        ...

    def health(self) -> Health:
        """Return whether writes currently succeed."""
        ...

    def snapshot(self, closed_steps: int = 8) -> Snapshot:
        """Read the committed state in one transaction.

        Raises:
            CatalogueUnavailable: it cannot be read at the moment.
        """
        ...

    def close(self, timeout: float = 10.0) -> None:
        """Write the queue and stop; writes not done in `timeout` seconds fail.

        Their futures get `CatalogueUnavailable`. A closed store may be opened again.
        """
        ...
