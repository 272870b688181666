"""Data of the service: captures, files, registered engines, the audit log, its own values."""

from __future__ import annotations

from typing import Annotated, Final, TypedDict

from pydantic import Field
from sqlalchemy import Index

from stagescope_service.fields import Row, Run, Wall
from stagescope_service.store.tables.declare import StageWork, partial_index, table, view
from stagescope_wire.nonfinite import Json
from stagescope_wire.plan import StoredCapture
from stagescope_wire.schema import PartColumns

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


captures = table("captures", CaptureRow, "capture_id")


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


dumps = table(
    "dumps",
    DumpRow,
    "incarnation work_key capture_id",
    Index(None, "attempt_id", "step"),
    partial_index("ix_dumps_armed", "incarnation", where="state = 'armed'"),
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
    """The last announced mark."""
    digested_mark: int | None
    """The digested mark: if the two differ, the dump must be digested."""
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


UNREAD_DUMP: Final = "coalesce(digested_mark, -1) <> mark"
"""The condition that a dump is announced and not read, in the text of its partial index."""

operators = table(
    "operators",
    OperatorTableRow,
    "incarnation work_key capture_id",
    Index(None, "attempt_id", "step"),
    partial_index("ix_operators_undigested", "node_id", where=UNREAD_DUMP),
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


artifacts = view("artifacts", ArtifactRow, "artifact_id")


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


engines = table("engines", RegisteredEngine, "name")


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


audit = table("audit", AuditEntry, "audit_id", is_generated=True)


class MetaRow(TypedDict):
    """A row of `meta`."""

    key: str
    value: Json


meta = table("meta", MetaRow, "key")
