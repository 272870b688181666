"""Instructions: what the state machine returns, for `coordinator.effects` to carry out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

from typing_extensions import NotRequired

from stagescope_service.store.contract import Delete, Put
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.schema import PartColumns

__all__ = [
    "Aggregate",
    "AnnouncedDump",
    "AnswerPoll",
    "BuildOperatorTable",
    "CompareWeights",
    "Delete",
    "DumpKey",
    "DumpReported",
    "Ingest",
    "IngestJob",
    "Instruction",
    "JudgeCanary",
    "PayloadJob",
    "PayloadKey",
    "Put",
    "ReadWatchdogs",
    "Settled",
]


class PayloadKey(NamedTuple):
    """The delivery identity of a payload: the END event that announced it."""

    incarnation: str
    seq: int


class StepJob(TypedDict):
    """The step of a payload that is read again; the ring's file has the rest."""

    attempt_id: int
    step: int | None


class PayloadWork(StepJob, PartColumns):
    """The work and the rank of a payload."""

    role: str
    rank: int
    policy_version: int | None
    stage: str


class PayloadJob(PayloadWork):
    """A payload's work and process, as the rows of its summary need them; JSON."""

    run: str
    data_rank: int | None
    cp_size: NotRequired[int | None]
    """Context-parallel ranks."""


class IngestJob(PayloadJob):
    """A payload as the ingestor reads and keeps it; JSON."""

    attempt_key: str
    layout: NotRequired[JsonObject]
    settings: NotRequired[JsonObject]
    """The run's settings, as passed to `init`."""
    scalars: NotRequired[Mapping[str, float]]
    bytes: NotRequired[int | None]
    """As announced."""
    reported: NotRequired[bool]
    """Whether the probe has reported what is wrong with the payload."""
    keep: NotRequired[Sequence[str]]
    """Sections and names of tensors to keep in files; see `stagescope_wire.keep`."""
    no_room: NotRequired[str]
    """Why nothing may be kept; '' where there is room."""


class Ingest(NamedTuple):
    """Give a payload's refs to the ingestor of `node_id` (None: any)."""

    key: PayloadKey
    node_id: str | None
    job: IngestJob


class DumpKey(NamedTuple):
    """The identity of a dump: its process, its work and its capture."""

    incarnation: str
    work_key: str
    capture_id: str


class AnnouncedDump(PartColumns):
    """A row of `operators` as it announces a dump, and the dump's run."""

    incarnation: str
    work_key: str
    capture_id: str
    attempt_id: int
    step: int | None
    policy_version: int | None
    stage: str
    role: str
    rank: int
    node_id: str | None
    dump_path: str
    announced_wall: float
    mark: int
    truncated: bool
    run: str


class BuildOperatorTable(NamedTuple):
    """Have the ingestor of `node_id` build a dump's operator table."""

    key: DumpKey
    node_id: str | None
    job: AnnouncedDump


class DumpReported(NamedTuple):
    """A rank reported the state of a capture: a row of `dumps`, written by its own `Put`."""

    row: JsonObject


class AnswerPoll(NamedTuple):
    """Answer a process's poll now: a request waits for it."""

    incarnation: str


class ReadWatchdogs(NamedTuple):
    """Have the ingestor of `node_id` read the watchdog files of lapsed processes."""

    node_id: str | None
    paths: dict[str, str]
    """incarnation -> path."""


class Settled(NamedTuple):
    """A payload reached its final state; the receipt follows the commit of all before it."""

    key: PayloadKey
    state: str


class Aggregate(NamedTuple):
    """The summary of a closed step must be aggregated (again)."""

    attempt_id: int
    step: int


class Rejudge(NamedTuple):
    """The verdict on a closed step has changed, and is too long to be written with every event."""

    attempt_id: int
    step: int


class NonFiniteScalars(NamedTuple):
    """Scalars of an open step are NaN or infinite; rules check them when it closes."""

    attempt_id: int
    names: frozenset[str]
    finding: Put
    """The finding to write if it is new and an active rule covers it."""


class CompareWeights(NamedTuple):
    """The recorded weights of a version must be compared (again)."""

    attempt_id: int
    version: int


class JudgeCanary(NamedTuple):
    """Versions of a run's canary have records that are not judged."""

    run: str


Instruction = (
    Put
    | Delete
    | CompareWeights
    | JudgeCanary
    | Ingest
    | Settled
    | Aggregate
    | BuildOperatorTable
    | AnswerPoll
    | NonFiniteScalars
    | DumpReported
    | ReadWatchdogs
    | Rejudge
)
