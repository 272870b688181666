"""Types that many answers share: numbers, headings, pages, ranks."""

from __future__ import annotations

from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import NotRequired

from stagescope_service.fields import (
    Attempt,
    NodeId,
    Part,
    Rank,
    Role,
    Row,
    Run,
    Stage,
    Step,
    describe,
)
from stagescope_service.store.tables import UnfinishedRank
from stagescope_service.views.encoding import JsonObject


class Model(BaseModel):
    """An object of an answer, with no other fields than these."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=describe, defer_build=True)


ABSENT: Final[Any] = None
"""Default of a field that may be absent; every other field is always present."""

T = TypeVar("T")


class Link(Model):
    """An answer of the service to look at."""

    path: Annotated[str, Field(examples=["/steps/5/stages"])]
    """Its path and query."""
    noun: Annotated[str, Field(examples=["stages"])]
    """The noun for the answer."""
    step: int | Literal["latest"] | None
    """The step in the path; null: there is none."""
    name: str | None
    """The id in the path, such as of a capture; null: there is none."""
    run: Run | None
    """The run; null: the default one."""
    attempt: Attempt | None
    """The attempt; null: the newest."""
    query: dict[str, str]
    """Further arguments."""
    shows: Annotated[str, Field(examples=["who has arrived"])]
    """The content of the answer; empty: the noun says it."""


Complete = Annotated[
    Literal["complete", "partial", "unknown", "open"],
    Field(
        description="Whether all expected ranks arrived: for a closed step `complete`, `partial` "
        "or `unknown` (the number of ranks is unknown); for another `open`."
    ),
]
RowsGap = Annotated[
    str | None, Field(description="Why rows are missing that retention removed; null: none are.")
]
GapText = Annotated[
    str | None,
    Field(
        description="Gap in the numbers of a closed step, or why it has none; null: no gap.",
        examples=["numbers without 1 payload lost"],
    ),
]


class BegunAgain(Row):
    """Ranks that began a step again within its attempt: both passes count in one step."""

    role: Role
    ranks: Annotated[list[int], Field(examples=[[0, 1]])]
    """The ranks that began again, ascending."""
    stages: Annotated[list[str], Field(examples=[["actor_update"]])]
    """The stages that were seen to begin again, by name in ascending order."""


BegunAgainIn = Annotated[
    list[BegunAgain],
    Field(
        description="Who began the step again within the attempt (training that went back inside "
        "its process): both passes count in its numbers. Mostly empty."
    ),
]


class LiveRun(Model):
    """Another run that is live."""

    run: Run
    attempt: Attempt


class RunHeading(Model):
    """Which run an answer is about."""

    run: Run
    display_name: str | None = None
    """The text that people see for the run; absent: its name."""
    also_live: list[LiveRun]
    """The other runs that are live."""


class AttemptHeading(RunHeading):
    """Which attempt an answer is about."""

    attempt: Attempt


class ScopeHeading(RunHeading):
    """Which attempts an answer is about."""

    attempt: Attempt | None
    """The requested attempt; null: every attempt of the run."""


class StepHeading(AttemptHeading):
    """Which step an answer is about."""

    step: Step
    superseded_by: int | None
    """Number of the newest attempt that repeats this step; null: none does."""


class Page(BaseModel, Generic[T]):
    """A page of a list; an answer is a `Model` as well."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=describe, defer_build=True)

    rows: list[T]
    """The rows of this page, in the list's order."""
    next: Annotated[str | None, Field(examples=["czEuMTAw"])]
    """Give it as `cursor` for the next page; null: there is none."""


class Missing(UnfinishedRank):
    """A rank that has not ended a stage in which it was expected."""

    since: float | None
    """Unix seconds: since it began the stage, else since the first rank did; null: unknown."""


class ListedMissing(UnfinishedRank):
    """A rank that had not ended a stage in which it was expected, as lists of steps name it."""

    since: NotRequired[float | None]
    """Unix seconds, of a step that is open: since it began the stage, else the first rank did."""


class Layout(Model):
    """Where a rank runs, and its parallel coordinates; unknown fields are absent."""

    data_rank: int = ABSENT
    """Number that ranks with the same rows share."""
    world_size: int = ABSENT
    """Number of ranks of its role."""
    node_id: str = ABSENT
    """Ray's id of the node."""
    pid: int = ABSENT
    """Process id on its host."""
    cluster: str = ABSENT
    """Name of the cluster, as its process reported it."""
    node: str = ABSENT
    """Ray's id of the node, or the name that its process gave."""
    host: str = ABSENT
    """Name of the host, as the operating system reports it unless its process gave another."""
    device_kind: Annotated[str, Field(examples=["npu"])] = ABSENT
    """Kind of the device in use: `npu`, `cuda` or `cpu`, unless its process gave another."""
    device_index: int = ABSENT
    """Index of the device among those that the process sees, from 0."""
    device_serial: str = ABSENT
    """Serial number (uuid) of the device."""
    dp_rank: int = ABSENT
    """Data-parallel rank, from 0."""
    dp_size: int = ABSENT
    """Number of data-parallel ranks."""
    tp_rank: int = ABSENT
    """Tensor-parallel rank, from 0."""
    tp_size: int = ABSENT
    """Number of tensor-parallel ranks."""
    pp_rank: int = ABSENT
    """Pipeline-parallel rank, from 0."""
    pp_size: int = ABSENT
    """Number of pipeline-parallel ranks."""
    vpp_rank: int = ABSENT
    """Virtual pipeline-parallel rank, from 0."""
    vpp_size: int = ABSENT
    """Number of virtual pipeline-parallel ranks."""
    cp_rank: int = ABSENT
    """Context-parallel rank, from 0."""
    cp_size: int = ABSENT
    """Number of context-parallel ranks."""
    sp_rank: int = ABSENT
    """Sequence-parallel rank, from 0."""
    sp_size: int = ABSENT
    """Number of sequence-parallel ranks."""
    ep_rank: int = ABSENT
    """Expert-parallel rank, from 0."""
    ep_size: int = ABSENT
    """Number of expert-parallel ranks."""
    etp_rank: int = ABSENT
    """Expert-tensor-parallel rank, from 0."""
    etp_size: int = ABSENT
    """Number of expert-tensor-parallel ranks."""
    engine: Annotated[str, Field(examples=["vllm"])] = ABSENT
    """Inference engine that the process runs."""
    engine_version: str = ABSENT
    """Version of the inference engine."""
    framework: Annotated[str, Field(examples=["verl"])] = ABSENT
    """Training framework of the process."""
    framework_version: str = ABSENT
    """Version of the training framework."""


class DumpRow(Row):
    """The dump of one capture on one rank in one part of a stage."""

    part: Part
    stage: Stage
    role: Role
    rank: Rank
    state: Annotated[str | None, Field(examples=["complete", "missed", "failed", "truncated"])]
    """`complete`, `truncated`, `failed`, `missed` or `skipped`; `armed` while it collects; null:
    unknown."""
    bytes: int | None
    """Size of its files in bytes."""
    files: int | None
    """Number of its files."""
    path: str | None
    """msprobe's directory on that node; null: the rank reported none."""
    node_id: NodeId | None
    """Ray's id of the node of the rank's process; null: unknown."""
    capture_id: str
    """Id of the capture; `local` where the rank named none."""
    task: Annotated[str | None, Field(examples=["statistics"])]
    """msprobe's task."""
    level: Annotated[str | None, Field(examples=["L1"])]
    """msprobe's level."""
    seconds: float | None
    """Seconds of the rank's stage that the capture took."""
    error: str | None
    """Why it was missed, failed or cut off."""
    overrides: list[object] | JsonObject | None
    """Fields of msprobe's configuration that the service changed."""
    estimate: JsonObject | None
    """Its expected cost: `bytes`, `seconds` and their `basis`."""
    wall: float | None
    """Unix seconds: when the rank reported it."""
