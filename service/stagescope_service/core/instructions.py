"""What the state machine asks of the shell around it: nothing else reaches the outside."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from stagescope_service.store.contract import Delete, Put

__all__ = [
    "Aggregate",
    "Ask",
    "BuildOperatorTable",
    "CompareWeights",
    "Delete",
    "DumpKey",
    "Ingest",
    "Instruction",
    "PayloadKey",
    "Put",
    "ReadWatchdogs",
    "Settled",
]


class PayloadKey(NamedTuple):
    """The delivery identity of a payload: the END event that announced it."""

    incarnation: str
    seq: int


class Ingest(NamedTuple):
    """Hand a payload's refs to the ingestor of `node_id` (any, where it is None)."""

    key: PayloadKey
    node_id: str | None
    job: dict[str, Any]


class DumpKey(NamedTuple):
    """The identity of a dump: whose it is, of which work, for which capture."""

    incarnation: str
    work_key: str
    capture_id: str


class BuildOperatorTable(NamedTuple):
    """Have the ingestor of `node_id` make a dump's operator table; `job` is its announcement."""

    key: DumpKey
    node_id: str | None
    job: dict[str, Any]


class Ask(NamedTuple):
    """Have a process's poll answered now: a request waits for it."""

    incarnation: str


class ReadWatchdogs(NamedTuple):
    """Have the ingestor of `node_id` read the watchdogs' files of processes that fell silent."""

    node_id: str | None
    paths: dict[str, str]
    """incarnation -> path."""


class Settled(NamedTuple):
    """A payload reached its end: its receipt may go out once everything before is committed."""

    key: PayloadKey
    state: str


class Aggregate(NamedTuple):
    """The whole of a closed step must be formed (again)."""

    attempt_id: int
    step: int


class CompareWeights(NamedTuple):
    """The recorded weights of a version must be compared (again)."""

    attempt_id: int
    version: int


Instruction = (
    Put
    | Delete
    | CompareWeights
    | Ingest
    | Settled
    | Aggregate
    | BuildOperatorTable
    | Ask
    | ReadWatchdogs
)


class Effects(Protocol):
    """What carries out instructions that are not rows."""

    def ingest(self, order: Ingest, payload: object) -> None:
        """Have an ingestor read a payload; its outcome comes back by `Reception.settle`."""

    def aggregate(self, order: Aggregate) -> None:
        """Aggregate a step."""

    def read_watchdogs(self, order: ReadWatchdogs) -> None:
        """Read files of watchdogs; what they say comes back by `Reception.watchdog`."""

    def build_operator_table(self, order: BuildOperatorTable) -> None:
        """Have an ingestor make a dump's operator table."""

    def compare_weights(self, order: CompareWeights) -> None:
        """Compare the recorded weights of a version."""
