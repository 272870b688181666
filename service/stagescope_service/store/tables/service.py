"""Data of the service: captures, files, registered engines, the audit log, its own values."""

from __future__ import annotations

from typing import Annotated, TypedDict

from pydantic import Field
from sqlalchemy import Column, Index

from stagescope_service.fields import Row, Run, Wall
from stagescope_service.store.columns import Flag, Int, Real, StrictJson, Text
from stagescope_service.store.tables.declare import (
    StageWork,
    columns,
    key,
    partial_index,
    place,
    table,
    view,
)
from stagescope_wire.nonfinite import Json
from stagescope_wire.plan import StoredCapture
from stagescope_wire.schema import PART_FIELDS, PartColumns

captures = table(
    "captures",
    key("capture_id", Text),
    Column("run", Text),
    Column("spec", StrictJson()),
    *columns(Text, "state by"),
    *columns(Real, "created_wall removed_wall"),
    Column("removed_by", Text),
    Column("revision", Int),
)


CaptureState = Annotated[
    str,
    Field(
        description="`asked` (not every rank has acknowledged), `agreed`, `done`, `complete`, "
        "`partial`, `empty` (no rank did these stages in its steps), `given up`, `too late`, "
        "`refused` or `withdrawn`.",
        examples=["agreed"],
    ),
]


class CaptureColumns(Row):
    """A capture as the catalogue holds it."""

    capture_id: str
    """Id of the capture."""
    run: Run | None
    """Null: every run."""
    state: CaptureState
    by: str
    """Who requested it, as in `spec`."""
    created_wall: float
    """Unix seconds."""
    removed_wall: float | None
    """Unix seconds: when it was withdrawn or ended; null: it is active."""
    removed_by: str | None
    """Who withdrew it; `service` if it ended; null: it is active."""
    revision: int
    """First revision of the plan that tells ranks its present state."""


class CaptureRow(CaptureColumns):
    """A row of `captures`."""

    spec: StoredCapture


dumps = table(
    "dumps",
    key("incarnation", Text),
    key("work_key", Text),
    key("capture_id", Text),
    *place(),
    *columns(Text, "path node_id state"),
    *columns(Int, "bytes files"),
    Column("seconds", Real),
    *columns(Text, "task level error"),
    *columns(StrictJson(), "overrides estimate"),
    Column("wall", Real),
    Index(None, "attempt_id", "step"),
    partial_index("ix_dumps_armed", "incarnation", where="state = 'armed'"),
)


class DumpRow(StageWork):
    """A row of `dumps`."""

    incarnation: str
    work_key: str
    capture_id: str
    path: str | None
    node_id: str | None
    state: str | None
    bytes: int | None
    files: int | None
    seconds: float | None
    task: str | None
    level: str | None
    error: str | None
    overrides: dict[str, Json] | None
    estimate: dict[str, Json] | None
    wall: float | None


operators = table(
    "operators",
    key("incarnation", Text),
    key("work_key", Text),
    key("capture_id", Text),
    *place(),
    *columns(Text, "node_id dump_path"),
    Column("announced_wall", Real),
    # The last announced mark and the digested one: if they differ, the dump must be digested.
    *columns(Int, "mark digested_mark"),
    Column("truncated", Flag()),
    *columns(Text, "state reason path checksum task level"),
    *columns(Int, "bytes calls rows non_finite_rows truncated_at"),
    *columns(Flag(), "done certain"),
    *columns(StrictJson(), "first_non_finite summary"),
    Column("wall", Real),
    Index(None, "attempt_id", "step"),
    partial_index(
        "ix_operators_undigested", "node_id", where="coalesce(digested_mark, -1) <> mark"
    ),
)


class OperatorTableRow(StageWork):
    """A row of `operators`."""

    incarnation: str
    work_key: str
    capture_id: str
    node_id: str | None
    dump_path: str | None
    announced_wall: float | None
    mark: int | None
    digested_mark: int | None
    truncated: bool | None
    state: str | None
    reason: str | None
    path: str | None
    checksum: str | None
    task: str | None
    level: str | None
    bytes: int | None
    calls: int | None
    rows: int | None
    non_finite_rows: int | None
    truncated_at: int | None
    done: bool | None
    certain: bool | None
    first_non_finite: dict[str, Json] | None
    summary: dict[str, Json] | None
    wall: float | None


artifacts = view(
    "artifacts",
    key("artifact_id", Text),
    Column("incarnation", Text),
    *columns(Int, "seq attempt_id step"),
    *columns(Text, "stage role"),
    Column("rank", Int),
    *columns(Text, "kind node_id path"),
    Column("bytes", Int),
    Column("checksum", Text),
    *columns(Flag(), "shared pinned"),
    *columns(Real, "wall deleted_wall"),
    *columns(Int, f"policy_version {' '.join(PART_FIELDS)}"),
    *columns(StrictJson(), "sections tensors"),
)


class ArtifactRow(PartColumns):
    """A row of `artifacts`."""

    artifact_id: str
    incarnation: str
    seq: int
    attempt_id: int
    step: int | None
    stage: str
    role: str
    rank: int
    kind: str
    node_id: str
    path: str
    bytes: int
    checksum: str | None
    shared: bool | None
    pinned: bool | None
    wall: float
    deleted_wall: float | None
    policy_version: int | None
    sections: dict[str, list[str]] | None
    """Section -> names, for a kept file."""
    tensors: dict[str, list[Json]] | None
    """Tensor -> [dtype, shape, rows or None], for a kept file."""


engines = table(
    "engines",
    key("name", Text),
    *columns(Text, "url kind model version run by note"),
    Column("wall", Real),
    Column("settings", StrictJson()),
)


class RegisteredEngine(Row):
    """A long-lived inference engine, as it was registered."""

    name: Annotated[str, Field(examples=["gpu7-8000"])]
    """Name of the registration; unless given, host and port of the URL."""
    url: Annotated[str, Field(examples=["http://gpu7:8000"])]
    """The engine's base URL, without a trailing `/v1`."""
    kind: Annotated[str | None, Field(examples=["vllm", "sglang", "llama.cpp", "openai"])]
    """Kind of the engine, as it was registered; null: not given."""
    model: str | None
    """The model that it serves."""
    version: str | None
    """Version of the engine, as it was registered; null: not given."""
    run: Run | None
    """The run that uses it."""
    note: str | None
    """Text for other users; null: none was given."""
    settings: dict[str, Json] | None
    """Settings that the engine reported; null: none."""
    by: str
    """Who registered it."""
    wall: Wall


audit = table(
    "audit",
    Column("audit_id", Int, primary_key=True, autoincrement=True),
    Column("wall", Real),
    *columns(Text, "by action"),
    Column("detail", StrictJson()),
)


class AuditEntry(Row):
    """An action that a user or a program requested."""

    audit_id: int
    """Number of the entry, from 1."""
    wall: float | None
    """When, in Unix seconds."""
    by: str | None
    """Who: the name of the access token, what its sender calls itself, and the address."""
    action: str | None
    """The action, such as `add_capture`, `remove_capture`, `set_triggers`, `pin`, `ask_stacks`."""
    detail: dict[str, Json] | None
    """The details of the request."""


meta = table("meta", key("key", Text), Column("value", StrictJson()))


class MetaRow(TypedDict):
    """A row of `meta`."""

    key: str
    value: Json
