"""The contract of the store: what the engine may rely on, whatever the database.

The engine says what a row is to hold (`Put`) and gets a future; the future is resolved when that
is on disk. Rows have natural primary keys and a `Put` names the columns that it sets, so every
write may be repeated: the outcome of any resubmission is the outcome of the last.

The reading side is `catalogue.Catalogue`, which other processes use; the engine reads once, at
its start, by `snapshot()`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

Row = dict[str, Any]


class Put(NamedTuple):
    """Upsert: `row` holds the whole primary key and the columns to set; the others stay."""

    table: str
    row: Mapping[str, Any]


class Delete(NamedTuple):
    """Delete every row whose columns equal `where`; an empty `where` is refused."""

    table: str
    where: Mapping[str, Any]


Write = Put | Delete


class Health(NamedTuple):
    """Whether what is submitted now is written, and if not, why and what to do."""

    healthy: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """What a coordinator needs to go on where its predecessor stopped; plain rows by table.

    * `runs`, `attempts`, `captures`: all of them (captures that were removed too).
    * `processes`: those that neither finished nor lapsed, those with a payload in state
      'announced', and all of the attempts that have not ended or are the newest of their run.
    * `steps`: those not closed, and the last closed ones of each attempt; without their blobs.
    * `stages`: the open ones, and those of these steps in attempts that have not ended or are
      the newest of their run; of work without a step the unfinished ones.
    * `unformed`: (attempt_id, step) of the closed steps whose summary lacks parts read later.
    * `armed`: dumps that began and did not report an end.
    * `undigested`: `operators` of the dumps that were announced and not digested since.
    * `asked_stacks`: `stacks` that were asked for and not answered.
    * `payloads`: those in state 'announced', and those of these steps in these attempts.
    * `findings`: of each run's newest attempt, and those of no attempt.
    """

    runs: list[Row]
    attempts: list[Row]
    processes: list[Row]
    steps: list[Row]
    stages: list[Row]
    payloads: list[Row]
    captures: list[Row]
    findings: list[Row]
    last_attempt_id: int
    """The highest attempt_id ever given; 0 where there is none."""
    last_revision: int
    """The highest revision of the plan that a capture bears; 0 where there is none."""
    meta: dict[str, Any]
    unformed: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    armed: list[Row] = dataclasses.field(default_factory=list)
    undigested: list[Row] = dataclasses.field(default_factory=list)
    asked_stacks: list[Row] = dataclasses.field(default_factory=list)


class Store(Protocol):
    """The writing side.

    **Durability.** A future is resolved without an error only after its rows are committed and
    on disk. Nothing else is ever acknowledged.

    **Order.** Submissions are applied in the order of the calls: where two set the same column of
    the same row, the later one stands.

    **Failure.** While the database cannot be written (locked, disk full, unreachable) nothing is
    given up: submissions stay queued, `health()` says why, and writing is tried again until it
    works or the store is closed. A submission that can never be written (a wrong type, a
    violated constraint, an unknown column) fails alone, with `StoreError`.

    **Thread safety.** `submit`, `health` and `snapshot` may be called from any thread.
    """

    def open(self) -> None:
        """Create or upgrade the catalogue and begin to write; again on an open store: nothing.

        Raises:
            CatalogueUnavailable: it cannot be opened now; the message says what to do. The same
                call may be made again.
        """
        ...

    def submit(self, puts: Sequence[Write]) -> Future[None]:
        """Queue writes that stand or fall together; never waits for the disk."""
        ...

    def health(self) -> Health:
        """Say whether writes get through at the moment."""
        ...

    def snapshot(self, closed_steps: int = 8) -> Snapshot:
        """Read what is committed, as of one moment.

        Raises:
            CatalogueUnavailable: it cannot be read now.
        """
        ...

    def close(self, timeout: float = 10.0) -> None:
        """Write what is queued and stop; what cannot be written in `timeout` seconds fails.

        Futures of such writes get `CatalogueUnavailable`. A closed store may be opened again.
        """
        ...
