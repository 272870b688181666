"""Answers about the service, processes that speak HTTP, engines and weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stagescope_service.api.encoding import JsonObject
from stagescope_service.api.models.common import (
    ABSENT,
    AttemptHeading,
    Json,
    Model,
    NodeId,
    Page,
    Rank,
    Role,
    RoleRank,
    Run,
    Step,
    StepHeading,
    Wall,
)


class Healthy(Model):
    """The API's process lives."""

    status: Literal["ok"]
    version: Annotated[str, Field(examples=["0.1.0"])]


class Ready(Model):
    """Questions and events can be answered."""

    status: Literal["ready"]


class Load(Model):
    """How the coordinator keeps up with events."""

    waiting_events: int
    """Events that were received and not committed yet."""
    pushed_back: int
    """Batches that senders must send again, because the queue was full."""
    lag_seconds: float | None
    """Average age of events on arrival; null: none arrived recently."""
    pause_seconds: float
    """Pause between batches that senders are requested to make; 0 where it keeps up."""


class Keeping(Model):
    """Whether what is to be kept is kept."""

    healthy: bool
    reason: str | None
    """Why something is not kept; null where everything is."""
    not_kept: int
    """Payloads that were to be kept and are not."""
    bytes: dict[str, int]
    """Node -> bytes of its kept files."""
    limit_bytes: int | None
    """Most bytes of a node; null: no bound."""


class CoordinatorStatus(Model):
    """The coordinator's own state; where it does not answer, `not_ready` alone."""

    coordinator: str = ABSENT
    """Its incarnation: another after each restart."""
    pid: int = ABSENT
    started: float = ABSENT
    """Unix seconds."""
    wall: float = ABSENT
    """Unix seconds of its clock."""
    not_ready: str = ABSENT
    """Why it cannot serve."""
    events_taken: int = ABSENT
    load: Load = ABSENT
    memory_bytes: int | None = ABSENT
    """Memory of its process; null where the system does not report it."""
    live_processes: int = ABSENT
    pending_payloads: int = ABSENT
    """Announced, and not read yet."""
    revision: int = ABSENT
    """Of the plan."""
    poll_seconds: float = ABSENT
    """After how long a poll ends."""
    keeping: Keeping | None = ABSENT


class Status(Model):
    """The state of the service."""

    ready: bool
    reason: str | None
    """Why it is not ready."""
    version: str
    wall: Wall
    coordinator: CoordinatorStatus
    data_dir: str
    """Where files are kept."""
    catalogue_bytes: int | None
    """Size of the catalogue on disk; null: unknown."""


# --- processes without Ray ----------------------------------------------------------------
class RankPlan(Model):
    """The plan as a rank receives it."""

    revision: int
    captures: list[JsonObject]
    """The captures that concern the run, with `phase`, `agreement` (its number) and `steps`."""
    keep: Json = ABSENT
    """The keep policy of the run, from the settings' file."""


class Taken(Model):
    """The result of a batch of events, after its commit."""

    coordinator: str
    """Its incarnation: to another one, payloads without a receipt are offered again."""
    wall: Wall
    received: int
    """Events that were recorded."""
    refused: dict[str, str]
    """seq -> why that event was refused; it need not be sent again."""
    refused_in_part: dict[str, str] = ABSENT
    """seq -> the part of an event that was refused; the rest was recorded."""
    receipts: dict[str, str]
    """seq -> the state of its payload: `ingested`, `refused`, `lost` or `dropped`."""
    revision: int
    """Of the plan."""
    plan: RankPlan = ABSENT
    """The plan, where the sender has another revision in force."""
    pause: float = ABSENT
    """Seconds to wait before the next batch: the service is behind."""


class RankRequest(Model):
    """A request to a process."""

    what: Annotated[str, Field(examples=["stacks"])]
    request_id: str


class News(Model):
    """Changes for a process."""

    coordinator: str
    """Its incarnation."""
    wall: Wall
    revision: int
    """Of the plan."""
    plan: RankPlan | None
    """Null where it has not changed."""
    receipts: dict[str, str]
    """seq -> the state of the payload, for the requested ones."""
    requests: list[RankRequest]
    """Requests that the process must answer."""
    poll_seconds: float
    """After how long a poll ends."""


class Drained(Model):
    """Whether everything that was announced is read."""

    run: Run | None
    """Null: any run."""
    drained: bool
    pending: int
    """Payloads that are still to be read."""
    known: bool
    """Whether the run, or an attempt of the key, ever reported anything."""
    missing: list[Annotated[str, Field(examples=["actor rank 3"])]]
    """Ranks of these attempts that never reported, or did not finish."""


# --- engines ------------------------------------------------------------------------------
class RegisteredEngine(Model):
    """A long-lived inference engine, as it was registered."""

    name: Annotated[str, Field(examples=["gpu7-8000"])]
    url: Annotated[str, Field(examples=["http://gpu7:8000"])]
    kind: Annotated[str | None, Field(examples=["vllm", "sglang", "llama.cpp", "openai"])]
    model: str | None
    """What it serves."""
    version: str | None
    run: Run | None
    """The run that uses it."""
    note: str | None
    settings: JsonObject | None
    """As reported by the engine."""
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
    status: int | None = ABSENT
    """The HTTP status of its answer; null: it gave none."""
    reason: str = ABSENT
    """Why it is not up."""
    answered_seconds: float = ABSENT
    """How long its answer took."""
    checked_wall: float = ABSENT
    """Unix seconds of the check."""
    age_seconds: float = ABSENT
    """How long ago that is."""


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
    records: int
    """How many ranks' records it rests on."""
    agree: int
    differ: int
    missing: int
    not_comparable: int
    replicas_differ: int
    """Weights of which replicas hold something else."""
    complete: bool
    """Whether all expected ranks have recorded, or no further one will."""
    ranks: RecordedBy
    names: dict[str, list[str]]
    """Verdict -> names of the first such weights."""
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
    shape: list[int] | None
    ranks: list[int]
    """Ranks of the rollout that differ."""
    odd_ranks: list[RoleRank]
    """Ranks of either side whose replicas hold something else."""
    reason: str | None
    """Why it cannot be compared, or on which side it is missing."""
    trainer: Annotated[str | None, Field(examples=["0123456789abcdef"])]
    """The trainer's checksum: 16 hexadecimal digits."""
    rollout: Annotated[str | None, Field(examples=["0123456789abcdef"])]
    """The rollout's."""
    kind: str
    """What was recorded, such as `weights`; kinds are compared each for itself."""
    trainer_name: str | None
    """Its own name in the trainer."""
    rollout_name: str | None
    """Its own name in the rollout engine."""


class _Weights(Model, Page[Weight]):
    version: int
    """The policy version."""
    versions: list[int]
    """The versions that were recorded, newest first."""
    complete: bool
    """Whether all expected ranks have recorded, or no further one will."""
    counts: dict[str, int]
    """Verdict -> how many weights; `replicas differ` beside them, where there are some."""
    recorded: RecordedBy


class WeightsOfVersion(AttemptHeading, _Weights):
    """The weights of a version, the worst first."""


class WeightsOfStep(StepHeading, _Weights):
    """The weights that were recorded at a step, the worst first."""


class Device(Model):
    """A device whose weights were not its replicas'."""

    device: str
    """Its serial, else host/kind and index."""
    odd: int
    """In how many recorded versions most replicas held something else."""
    suspected: int
    """In how many there was no majority."""
    runs: list[str]
    attempts: int
    """How many attempts."""
    last_run: Run
    last_step: Step | None
    last_version: int
    last_role: Role
    last_rank: Rank
    tensors: int
    """How many tensors were odd the last time."""
    names: list[str]
    """The first of them."""
    host: str | None
    node_id: NodeId | None
    device_kind: str | None
    device_index: int | None
    device_serial: str | None
    last_wall: float | None
    """Unix seconds."""


class Devices(Model, Page[Device]):
    """Devices, the most often outvoted first."""

    run: Run | None
    """The requested run; null: all runs."""
