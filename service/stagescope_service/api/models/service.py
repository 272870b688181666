"""Answers about the service, processes that speak HTTP, engines and weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stagescope_service.api.encoding import JsonObject
from stagescope_service.api.models.common import (
    ABSENT,
    AttemptHeading,
    Model,
    NodeId,
    Page,
    Rank,
    Role,
    RoleRank,
    RowsGap,
    Run,
    Step,
    StepHeading,
    Wall,
)


class Healthy(Model):
    """The API's process lives."""

    status: Literal["ok"]
    """That the process answers."""
    version: Annotated[str, Field(examples=["0.1.0"])]
    """Version of the installed package `stagescope`."""


class Ready(Model):
    """Questions and events can be answered."""

    status: Literal["ready"]
    """That requests can be served."""


class Whoami(Model):
    """What the sender of a request may do."""

    grade: Literal["read", "operate"] | None
    """`read`: everything that changes nothing; `operate`: everything; null: nothing, for want of a
    token or login."""
    role: Literal["read", "operate", "admin"] | None
    """As `grade`, but `admin`: it may read the audit, too."""
    user: str
    """What it calls itself, by the header `X-Stagescope-User`, else `unknown`."""
    token: str | None
    """The name of its token; null: one of the two of the home, or none."""
    person: str | None
    """Whom a trusted proxy says that it is; null: none does."""
    runs: list[str] | None
    """Always null: every token sees every run."""
    bundle: str | None
    """What is shown in place of a service: `the bundle x.tar.gz`; null: this is a service."""
    opens: str | None
    """The page's address of the step that the bundle is of; null: this is a service."""


class AuditEntry(Model):
    """Something that somebody did."""

    audit_id: int
    """Number of the entry, from 1."""
    wall: float | None
    """When, in Unix seconds."""
    by: str | None
    """Who: the name of the token, what its sender calls itself, and the address it came from."""
    action: str | None
    """What, such as `add_capture`, `remove_capture`, `set_triggers`, `pin`, `ask_stacks`."""
    detail: JsonObject | None
    """What was requested."""


class Audit(Model, Page[AuditEntry]):
    """Who did what, the newest first."""


class Load(Model):
    """How the coordinator keeps up with events."""

    waiting_events: int
    """Number of events that were received and not committed yet."""
    pushed_back: int
    """Number of batches, since the coordinator's start, that senders must send again because the
    queue was full."""
    lag_seconds: float | None
    """Mean age, in seconds, of the newest event of each batch on arrival, over the last 5 seconds;
    null: none arrived in them."""
    pause_seconds: float
    """Seconds between batches that senders are requested to leave; 0 where the coordinator keeps
    up."""


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
    load: Load = ABSENT
    """How it keeps up with events."""
    memory_bytes: int | None = ABSENT
    """Resident memory of its process in bytes; null where the system does not report it."""
    live_processes: int = ABSENT
    """Number of processes whose lease holds."""
    pending_payloads: int = ABSENT
    """Number of payloads that are announced and not read yet."""
    revision: int = ABSENT
    """Revision of the plan in force."""
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
class RankPlan(Model):
    """The plan as a rank receives it."""

    revision: int
    """Revision of the plan."""
    captures: list[JsonObject]
    """The captures that concern the run, with `phase`, `agreement` (its number) and `steps`."""
    keep: Annotated[
        object, Field(description="The keep policy of the run, from the settings' file.")
    ] = ABSENT


class Taken(Model):
    """The result of a batch of events, after its commit."""

    coordinator: str
    """Its incarnation: to another one, payloads without a receipt are offered again."""
    wall: Wall
    received: int
    """Number of events that were recorded."""
    refused: dict[str, str]
    """seq -> why that event was refused; it need not be sent again."""
    attempt_key: str = ABSENT
    """Key of the process's attempt, where the process gave none."""
    refused_in_part: dict[str, str] = ABSENT
    """seq -> the part of an event that was refused; the rest was recorded."""
    receipts: dict[str, str]
    """seq -> the state of its payload: `ingested`, `refused`, `lost` or `dropped`."""
    revision: int
    """Revision of the plan in force."""
    plan: RankPlan = ABSENT
    """The plan, where the sender has another revision in force."""
    pause: float = ABSENT
    """Seconds to wait before the next batch: the service is behind."""


class RankRequest(Model):
    """A request to a process."""

    what: Annotated[str, Field(examples=["stacks"])]
    """What is requested: `stacks`, or `finish` (send everything, then leave)."""
    request_id: str
    """Id of the request, which the answer names."""


class News(Model):
    """Changes for a process."""

    coordinator: str
    """Its incarnation."""
    wall: Wall
    revision: int
    """Revision of the plan in force."""
    plan: RankPlan | None
    """Null where it has not changed."""
    receipts: dict[str, str]
    """seq -> the state of the payload, for the requested ones."""
    requests: list[RankRequest]
    """Requests that the process must answer."""
    poll_seconds: float
    """Seconds after which a poll ends."""
    attempt_key: str = ABSENT
    """Key of the process's attempt, where the process gave none."""


class Drained(Model):
    """Whether everything that was announced is read."""

    run: Run | None
    """Null: any run."""
    drained: bool
    """Whether no payload is pending and, with an attempt key, its attempts are known and no rank is
    missing."""
    pending: int
    """Number of payloads that are still to be read."""
    known: bool
    """Whether the run, or an attempt of the key, ever reported anything."""
    missing: list[Annotated[str, Field(examples=["actor rank 3"])]]
    """Ranks of these attempts that never reported, or did not finish."""
    lost: list[Annotated[str, Field(examples=["actor rank 3: payloads 2"])]] = ABSENT
    """Ranks with events or payloads that were dropped, refused or lost, and how many."""


# --- engines ------------------------------------------------------------------------------
class RegisteredEngine(Model):
    """A long-lived inference engine, as it was registered."""

    name: Annotated[str, Field(examples=["gpu7-8000"])]
    """Name of the registration; unless given, host and port of the URL."""
    url: Annotated[str, Field(examples=["http://gpu7:8000"])]
    """The engine's base URL, without a trailing `/v1`."""
    kind: Annotated[str | None, Field(examples=["vllm", "sglang", "llama.cpp", "openai"])]
    """Kind of the engine, as it was registered; null: not given."""
    model: str | None
    """What it serves."""
    version: str | None
    """Version of the engine, as it was registered; null: not given."""
    run: Run | None
    """The run that uses it."""
    note: str | None
    """What people should know of it; null: nothing was given."""
    settings: JsonObject | None
    """As reported by the engine; null: not given."""
    by: str
    """Who registered it."""
    wall: Wall


class UsedEngine(RegisteredEngine):
    """A registered engine and the runs that use it."""

    used_by: list[str]
    """Runs that registered it as theirs, or whose settings name it."""


class Engine(UsedEngine):
    """A registered engine and its last health check; before the first check only `state`."""

    state: Literal["up", "refuses", "unreachable", "not asked"]
    """The last health check: `up` (status 200 to 299), `refuses` (another status), `unreachable`
    (no answer); `not asked`: there was none."""
    status: int | None = ABSENT
    """The HTTP status of its answer; null: it gave none."""
    reason: str = ABSENT
    """Why it is not up; empty where it is."""
    answered_seconds: float = ABSENT
    """Seconds until its answer, or until the check gave up."""
    checked_wall: float = ABSENT
    """Unix seconds of the check."""
    age_seconds: float = ABSENT
    """Seconds since the check."""


class Engines(Model, Page[Engine]):
    """The registered engines by name."""


# --- weights ------------------------------------------------------------------------------
Verdict = Annotated[
    Literal["differs", "missing", "not comparable", "not compared", "agrees"],
    Field(
        description="`missing` on one side; `not comparable`: another dtype or shape, fused, cut "
        "up otherwise; `not compared`: one side recorded nothing; `agrees` bit for bit."
    ),
]
RecordedBy = Annotated[
    dict[str, dict[str, list[int]]],
    Field(
        description="Who recorded: side -> role -> ranks.",
        examples=[{"trainer": {"actor": [0, 1]}, "rollout": {"rollout": [0]}}],
    ),
]


class WeightVersion(Model):
    """How many weights of one version have which verdict."""

    version: int
    """The policy version."""
    step: Step | None
    """The trainer's step at which the version was recorded, the highest of several; null:
    unknown."""
    records: int
    """Number of records on which it rests: one for each call of a rank, repeated ones too."""
    agree: int
    """Number of weights of verdict `agrees`."""
    differ: int
    """Number of weights of verdict `differs`."""
    missing: int
    """Number of weights of verdict `missing`."""
    not_comparable: int
    """Number of weights of verdict `not comparable`."""
    replicas_differ: int
    """Number of weights of which replicas hold something else."""
    complete: bool
    """Whether all expected ranks have recorded, or no further one will."""
    ranks: RecordedBy
    names: dict[str, list[str]]
    """`differs`, `missing` and `replicas differ` -> names of the first such weights, 20 at most."""
    wall: float | None
    """Unix seconds: when the last of it was recorded."""


class WeightVersions(AttemptHeading, Page[WeightVersion]):
    """The versions of an attempt's weights, newest first."""


class Weight(Model):
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
    """What was recorded: `exchanged` (as sent or received) or `held` (as the process holds it);
    kinds are compared each for itself."""
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


class Device(Model):
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
