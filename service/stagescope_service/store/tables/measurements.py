"""Data that ranks handed over, and the results of reading it."""

from __future__ import annotations

from typing import Annotated, TypedDict

from pydantic import Field
from sqlalchemy import Index

from stagescope_service.fields import Row, Step
from stagescope_service.store.tables.declare import RankWork, StageWork, table, view
from stagescope_wire.nonfinite import Json


class ScalarRow(RankWork):
    """A row of `scalars`."""

    incarnation: str
    work_key: str
    stage: str | None
    name: str
    value: float
    """Null for nan and inf, which `Catalogue.scalars` restores: SQLite stores NaN as NULL."""
    nonfinite: str | None
    """The name of a value that is not finite."""
    wall: float


scalars = view("scalars", ScalarRow, "incarnation work_key name")


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


payloads = view("payloads", PayloadRow, "incarnation seq")


class SummaryRow(StageWork):
    """A row of `summaries`."""

    incarnation: str
    seq: int
    pair: str
    data_rank: int | None
    summary: bytes | None


summaries = table(
    "summaries", SummaryRow, "incarnation seq pair", Index(None, "attempt_id", "step")
)


class StepMetricsRow(TypedDict):
    """A row of `step_metrics`."""

    attempt_id: int
    step: int
    version: int | None
    summary_wall: float | None
    """If `steps.summary_wall` differs, the row is from an earlier aggregation of the step."""
    stage: str | None
    verdict: str | None
    suspects: list[str] | None
    tokens: int | None
    masked_tokens: int | None
    unequal_tokens: int | None
    # The large ones last: SQLite reads all of a row up to the last column that a query needs.
    metrics: dict[str, float | str | None] | None
    slices: bytes | None


step_metrics = table("step_metrics", StepMetricsRow, "attempt_id step")


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


streams = table("streams", StreamRow, "attempt_id stream role stage")


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


samples = table(
    "samples", SampleRow, "attempt_id clock sample_uid", Index(None, "attempt_id", "step")
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
    manifest: str
    device_kind: str | None
    device_index: int | None
    device_serial: str | None
    checksums: bytes
    """Eight bytes a tensor, in the order of the manifest, which the versions have in common."""


weights = table(
    "weights",
    WeightsRow,
    "incarnation seq",
    Index(None, "attempt_id", "version"),
    Index(None, "attempt_id", "step"),
)


class WeightManifestRow(TypedDict):
    """A row of `weight_manifests`."""

    manifest: str
    tensors: bytes


weight_manifests = table("weight_manifests", WeightManifestRow, "manifest")


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


weight_verdicts = table("weight_verdicts", WeightVerdictRow, "attempt_id version")


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


odd_replicas = table(
    "odd_replicas", OddReplicaRow, "attempt_id version side role rank", Index(None, "device")
)
