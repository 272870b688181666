"""Answers about the service, processes that speak HTTP, engines and weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import NotRequired

from stagescope_service.coordinator.answers import LoadStatus
from stagescope_service.fields import NodeId, Rank, Role, RoleRank, Row, Run, Step, Wall, one_of
from stagescope_service.store.tables import AuditEntry, RegisteredEngine
from stagescope_service.store.tables.measurements import RecordedBy, WeightVersion
from stagescope_service.views.models.common import (
    ABSENT,
    AttemptHeading,
    Model,
    Page,
    RowsGap,
    StepHeading,
)


class Healthy(Model):
    """The API's process lives."""

    status: Literal["ok"]
    """Says that the process answers."""
    version: Annotated[str, Field(examples=["0.1.0"])]
    """Version of the installed package `stagescope`."""


class Ready(Model):
    """The service can answer requests and record events."""

    status: Literal["ready"]
    """Says that requests can be served."""


class Whoami(Model):
    """The rights and the name of a request's sender."""

    grade: Literal["read", "operate"] | None
    """`read`: everything that changes nothing; `operate`: everything; null: nothing, for want of a
    token or login."""
    role: Literal["read", "operate", "admin"] | None
    """As `grade`, but `admin`: it may read the audit, too."""
    user: str
    """Name that it gives itself by the header `X-Stagescope-User`, else `unknown`."""
    token: str | None
    """The name of its token; null: one of the two of the home, or none."""
    person: str | None
    """Person that a trusted proxy names; null: it names none."""
    runs: list[str] | None
    """Always null: every token sees every run."""
    bundle: str | None
    """Name of the opened bundle, such as `the bundle x.tar.gz`; null: this is a service."""
    opens: str | None
    """The page's address of the step that the bundle is of; null: this is a service."""


class Audit(Model, Page[AuditEntry]):
    """Who did what, the newest first."""


class Keeping(Model):
    """Whether what is to be kept is kept."""

    healthy: bool
    """Whether everything that is to be kept is kept."""
    reason: str | None
    """Why something is not kept; null where everything is."""
    not_kept: int
    """Number of payloads, since the coordinator's start, that were to be kept and are not."""
    bytes: dict[str, int]
    """Node -> bytes of its kept files; a node has no entry before the coordinator counted them."""
    limit_bytes: int | None
    """Most bytes of kept files on a node; 0: nothing is kept."""


class CoordinatorStatus(Model):
    """The coordinator's own state; where it does not answer, `not_ready` alone."""

    coordinator: str = ABSENT
    """Its incarnation: another after each restart."""
    pid: int = ABSENT
    """Process id on the head node."""
    started: float = ABSENT
    """Unix seconds: when its process started."""
    wall: float = ABSENT
    """Unix seconds of its clock."""
    not_ready: str = ABSENT
    """Why it cannot serve."""
    events_taken: int = ABSENT
    """Number of events that were recorded since its start, raw calls included."""
    load: LoadStatus = ABSENT
    """How it keeps up with events."""
    memory_bytes: int | None = ABSENT
    """Resident memory of its process in bytes; null where the system does not report it."""
    live_processes: int = ABSENT
    """Number of processes whose lease holds."""
    pending_payloads: int = ABSENT
    """Number of payloads that are announced and not read yet."""
    revision: int = ABSENT
    """Revision of the active plan."""
    poll_seconds: float = ABSENT
    """Seconds after which a poll ends."""
    problem: str = ABSENT
    """Why it cannot serve, without details such as paths."""
    cluster_problem: str | None = ABSENT
    """Why the Ray cluster does not answer; null where it does."""
    keeping: Keeping | None = ABSENT
    """Whether what is to be kept is kept, and how much of it there is."""


class Status(Model):
    """The state of the service."""

    ready: bool
    """Whether requests can be served."""
    reason: str | None
    """Why it is not ready."""
    version: str
    """Version of the installed package `stagescope`."""
    wall: Wall
    coordinator: CoordinatorStatus
    """The coordinator's own state."""
    data_dir: str
    """Where files are kept."""
    catalogue_bytes: int | None
    """Size of the catalogue on disk in bytes; null: unknown."""


# --- processes without Ray ----------------------------------------------------------------
# --- engines ------------------------------------------------------------------------------
class UsedEngine(RegisteredEngine):
    """A registered engine and the runs that use it."""

    used_by: list[str]
    """Runs that registered it as theirs, or whose settings name it."""


class Engine(UsedEngine):
    """A registered engine and its last health check; before the first check only `state`."""

    state: Literal["up", "refuses", "unreachable", "not asked"]
    """The last health check: `up` (status 200 to 299), `refuses` (another status), `unreachable`
    (no answer); `not asked`: there was none."""
    status: NotRequired[int | None]
    """The HTTP status of its answer; null: it gave none."""
    reason: NotRequired[str]
    """Why it is not up; empty where it is."""
    answered_seconds: NotRequired[float]
    """Seconds until its answer, or until the check gave up."""
    checked_wall: NotRequired[float]
    """Unix seconds of the check."""
    age_seconds: NotRequired[float]
    """Seconds since the check."""


class Engines(Model, Page[Engine]):
    """The registered engines by name."""


# --- weights ------------------------------------------------------------------------------
Verdict = Annotated[
    str,
    one_of("differs", "missing", "not comparable", "not compared", "agrees"),
    Field(
        description="`missing` on one side; `not comparable`: another dtype or shape, fused, cut "
        "up otherwise; `not compared`: one side recorded nothing; `agrees` bit for bit."
    ),
]


class WeightVersions(AttemptHeading, Page[WeightVersion]):
    """The versions of an attempt's weights, newest first."""


class Weight(Row):
    """One weight: what was sent against what was received."""

    name: str
    """The name that both sides have, after renaming."""
    verdict: Verdict
    dtype: str | None
    """Its dtype in the trainer, else in the rollout; null: unknown."""
    shape: list[int] | None
    """Its shape in the trainer, else in the rollout, in elements; null: unknown."""
    ranks: list[int]
    """Ranks of the rollout that differ, ascending."""
    odd_ranks: list[RoleRank]
    """Ranks of either side whose replicas hold something else."""
    reason: str | None
    """Why it cannot be compared, or on which side it is missing."""
    trainer: Annotated[str | None, Field(examples=["0123456789abcdef"])]
    """The trainer's checksum: 16 hexadecimal digits; null: none was recorded."""
    rollout: Annotated[str | None, Field(examples=["0123456789abcdef"])]
    """The rollout's checksum, as `trainer`."""
    kind: str
    """Kind of the record: `exchanged` (as sent or received) or `held` (as the process holds it).
    Each kind is compared separately."""
    trainer_name: str | None
    """Its own name in the trainer; null: not in the trainer."""
    rollout_name: str | None
    """Its own name in the rollout engine; null: not in the rollout."""


class _Weights(Model, Page[Weight]):
    version: int
    """The policy version."""
    versions: list[int]
    """The policy versions that were recorded, newest first."""
    complete: bool
    """Whether all expected ranks have recorded, or no further one will."""
    counts: dict[str, int]
    """Verdict -> number of weights; `replicas differ` beside them, where there are some."""
    recorded: RecordedBy
    gap: RowsGap


class WeightsOfVersion(AttemptHeading, _Weights):
    """The weights of a version, the worst first."""


class WeightsOfStep(StepHeading, _Weights):
    """The weights that were recorded at a step, the worst first."""


class Device(Row):
    """A device whose weights were not its replicas'."""

    device: str
    """Its serial, else host/kind and index."""
    odd: int
    """Number of recorded versions in which most replicas held something else."""
    suspected: int
    """Number of recorded versions in which replicas differed without a majority."""
    runs: list[str]
    """Runs in which that was seen, by name."""
    attempts: int
    """Number of attempts in which that was seen."""
    last_run: Run
    last_step: Step | None
    """The trainer's step of the last time; null: unknown."""
    last_version: int
    """The policy version of the last time."""
    last_role: Role
    last_rank: Rank
    tensors: int
    """Number of tensors that were odd the last time."""
    names: list[str]
    """The first of their names, 20 at most."""
    host: str | None
    """Name of its host; null: unknown."""
    node_id: NodeId | None
    """Ray's id of its node; null: unknown."""
    device_kind: str | None
    """Its kind, such as `npu`; null: unknown."""
    device_index: int | None
    """Its index among those that the process sees, from 0; null: unknown."""
    device_serial: str | None
    """Its serial number; null: unknown."""
    last_wall: float | None
    """Unix seconds: when the weights of the last time were recorded."""


class Devices(Model, Page[Device]):
    """Devices, the most often outvoted first."""

    run: Run | None
    """The requested run; null: all runs."""
