"""Data that ranks handed over, and the results of reading it."""

from __future__ import annotations

from typing import Annotated, TypedDict

from pydantic import Field
from sqlalchemy import Column, Index

from stagescope_service.fields import Row, Step
from stagescope_service.store.columns import Blob, Flag, Int, Real, StrictJson, Text
from stagescope_service.store.tables.declare import (
    RankWork,
    StageWork,
    columns,
    key,
    place,
    table,
    view,
)
from stagescope_wire.nonfinite import Json

scalars = view(
    "scalars",
    key("incarnation", Text),
    key("work_key", Text),
    key("name", Text),
    *place(),
    # SQLite stores NaN as NULL, so a value that is not finite is named in a column of its own.
    Column("value", Real),
    Column("nonfinite", Text),
    Column("wall", Real),
)


class ScalarRow(RankWork):
    """A row of `scalars`."""

    incarnation: str
    work_key: str
    stage: str | None
    name: str
    value: float
    """Null for nan and inf, which `Catalogue.scalars` restores."""
    nonfinite: str | None
    wall: float


payloads = view(
    "payloads",
    key("incarnation", Text),
    key("seq", Int),
    *place(),
    *columns(Text, "work_key state reason"),
    *columns(StrictJson(), "tensors meta"),
    Column("bytes", Int),
    Column("node_id", Text),
    *columns(Real, "announced_wall settled_wall"),
    Column("digest", Text),
    Column("consumed_step", Int),
)


class PayloadRow(StageWork):
    """A row of `payloads`."""

    incarnation: str
    seq: int
    work_key: str
    state: str
    reason: str | None
    tensors: dict[str, Json] | None
    meta: dict[str, Json] | None
    bytes: int | None
    node_id: str | None
    announced_wall: float | None
    settled_wall: float | None
    digest: str | None
    consumed_step: int | None


summaries = table(
    "summaries",
    key("incarnation", Text),
    key("seq", Int),
    key("pair", Text),
    *place("data_rank"),
    Column("summary", Blob),
    Index(None, "attempt_id", "step"),
)


class SummaryRow(StageWork):
    """A row of `summaries`."""

    incarnation: str
    seq: int
    pair: str
    data_rank: int | None
    summary: bytes | None


step_metrics = table(
    "step_metrics",
    key("attempt_id", Int),
    key("step", Int),
    Column("version", Int),
    # If `steps.summary_wall` differs, the row is from an earlier aggregation of the step.
    Column("summary_wall", Real),
    *columns(Text, "stage verdict"),
    *columns(StrictJson(), "suspects metrics"),
    Column("slices", Blob),
    *columns(Int, "tokens masked_tokens unequal_tokens"),
)


class StepMetricsRow(TypedDict):
    """A row of `step_metrics`."""

    attempt_id: int
    step: int
    version: int | None
    summary_wall: float | None
    stage: str | None
    verdict: str | None
    suspects: list[str] | None
    metrics: dict[str, float | str | None] | None
    slices: bytes | None
    tokens: int | None
    masked_tokens: int | None
    unequal_tokens: int | None


streams = table(
    "streams",
    key("attempt_id", Int),
    key("stream", Text),
    key("role", Text),
    key("stage", Text),
    *columns(Text, "producer engine engine_version dtype"),
    Column("dtypes", StrictJson()),
    Column("quantisation", Text),
    Column("processed", Flag()),
    *columns(Real, "temperature top_p"),
    Column("top_k", Int),
    *columns(Text, "alignment routing"),
    Column("extra", StrictJson()),
)


class StreamRow(TypedDict):
    """A row of `streams`."""

    attempt_id: int
    stream: str
    role: str
    stage: str
    producer: str | None
    engine: str | None
    engine_version: str | None
    dtype: str | None
    dtypes: list[str] | None
    quantisation: str | None
    processed: bool | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    alignment: str | None
    routing: str | None
    extra: dict[str, Json] | None


samples = table(
    "samples",
    key("attempt_id", Int),
    key("clock", Text),
    key("sample_uid", Text),
    *columns(Int, "step policy_version"),
    Column("group_id", Text),
    Column("sample_index", Int),
    *columns(Text, "split data_source prompt_hash tokens_hash"),
    Column("policy_versions", StrictJson()),
    Column("consumed_step", Int),
    Column("reward", Real),
    *columns(Int, "tokens rounds"),
    Index(None, "attempt_id", "step"),
)


class SampleRow(TypedDict):
    """A row of `samples`."""

    attempt_id: int
    clock: str
    sample_uid: str
    step: int | None
    policy_version: int | None
    group_id: str | None
    sample_index: int | None
    split: str | None
    data_source: str | None
    prompt_hash: str | None
    tokens_hash: str | None
    policy_versions: list[int] | None
    consumed_step: int | None
    reward: float | None
    tokens: int | None
    rounds: int | None


weights = table(
    "weights",
    key("incarnation", Text),
    key("seq", Int),
    *columns(Int, "attempt_id step version"),
    *columns(Text, "side kind role"),
    Column("rank", Int),
    Column("wall", Real),
    # Eight bytes a tensor, in the order of the manifest, which the versions have in common.
    Column("checksums", Blob),
    *columns(Text, "manifest device_kind"),
    Column("device_index", Int),
    Column("device_serial", Text),
    Index(None, "attempt_id", "version"),
    Index(None, "attempt_id", "step"),
)


class WeightsRow(TypedDict):
    """A row of `weights`."""

    incarnation: str
    seq: int
    attempt_id: int
    step: int | None
    version: int
    side: str
    kind: str
    role: str
    rank: int
    wall: float
    checksums: bytes
    manifest: str
    device_kind: str | None
    device_index: int | None
    device_serial: str | None


weight_manifests = table("weight_manifests", key("manifest", Text), Column("tensors", Blob))


class WeightManifestRow(TypedDict):
    """A row of `weight_manifests`."""

    manifest: str
    tensors: bytes


weight_verdicts = table(
    "weight_verdicts",
    key("attempt_id", Int),
    key("version", Int),
    *columns(Int, "step records agree differ missing not_comparable replicas_differ"),
    Column("complete", Flag()),
    *columns(StrictJson(), "ranks names"),
    Column("wall", Real),
)


RecordedBy = Annotated[
    dict[str, dict[str, list[int]]],
    Field(
        description="Who recorded: side -> role -> ranks.",
        examples=[{"trainer": {"actor": [0, 1]}, "rollout": {"rollout": [0]}}],
    ),
]


class WeightVersion(Row):
    """The number of weights of one version by verdict."""

    version: int
    """The policy version."""
    step: Step | None
    """The trainer's step at which the version was recorded, the highest of several; null:
    unknown."""
    records: int
    """Number of compared records: one for each call of a rank, repeated ones too."""
    agree: int
    """Number of weights of verdict `agrees`."""
    differ: int
    """Number of weights of verdict `differs`."""
    missing: int
    """Number of weights of verdict `missing`."""
    not_comparable: int
    """Number of weights of verdict `not comparable`."""
    replicas_differ: int
    """Number of weights whose replicas hold something else."""
    complete: bool
    """Whether all expected ranks have recorded, or no further one will."""
    ranks: RecordedBy
    names: dict[str, list[str]]
    """`differs`, `missing` and `replicas differ` -> names of the first such weights, 20 at most."""
    wall: float | None
    """Unix seconds: when the last record of it was made."""


class WeightVerdictRow(WeightVersion):
    """A row of `weight_verdicts`."""

    attempt_id: int


odd_replicas = table(
    "odd_replicas",
    key("attempt_id", Int),
    key("version", Int),
    key("side", Text),
    key("role", Text),
    key("rank", Int),
    Column("run", Text),
    Column("step", Int),
    *columns(Text, "device host node_id device_kind"),
    Column("device_index", Int),
    Column("device_serial", Text),
    Column("is_outvoted", Flag()),
    *columns(Int, "replicas tensors"),
    Column("names", StrictJson()),
    Column("wall", Real),
    Index(None, "device"),
)


class OddReplicaRow(TypedDict):
    """A row of `odd_replicas`."""

    attempt_id: int
    version: int
    side: str
    role: str
    rank: int
    run: str
    step: int | None
    device: str | None
    host: str | None
    node_id: str | None
    device_kind: str | None
    device_index: int | None
    device_serial: str | None
    is_outvoted: bool | None
    replicas: int | None
    tensors: int
    names: list[str]
    wall: float | None
