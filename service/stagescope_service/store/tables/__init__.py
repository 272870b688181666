"""The tables of the catalogue: every column from day one, null where unknown.

Keys are natural, so that writing a row twice changes nothing. There are no foreign keys: events
arrive in any order, and a stage may be known before its process has said hello. Times end in
`_wall` (Unix seconds of the service's clock where an offset is known) or `_mono` (the process's
monotonic clock, seconds). Give `connect.REVISION` a new value with every change here.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from stagescope_service.store.tables.canary import (
    CanaryRow,
    CanarySequence,
    CanaryVerdictRow,
    canaries,
    canary_verdicts,
)
from stagescope_service.store.tables.compact import COMPACT
from stagescope_service.store.tables.declare import metadata, views
from stagescope_service.store.tables.findings import (
    FindingRow,
    FiringRow,
    LossRow,
    StackRow,
    Thread,
    TriggerRulesRow,
    findings,
    firings,
    losses,
    stacks,
    trigger_rules,
)
from stagescope_service.store.tables.measurements import (
    OddReplicaRow,
    PayloadRow,
    SampleRow,
    ScalarRow,
    StepMetricsRow,
    StreamRow,
    SummaryRow,
    WeightManifestRow,
    WeightsRow,
    WeightVerdictRow,
    odd_replicas,
    payloads,
    samples,
    scalars,
    step_metrics,
    streams,
    summaries,
    weight_manifests,
    weight_verdicts,
    weights,
)
from stagescope_service.store.tables.service import (
    ArtifactRow,
    AuditEntry,
    CaptureRow,
    DumpRow,
    MetaRow,
    OperatorTableRow,
    RegisteredEngine,
    artifacts,
    audit,
    captures,
    dumps,
    engines,
    meta,
    operators,
)
from stagescope_service.store.tables.training import (
    AttemptColumns,
    AttemptRow,
    ProcessColumns,
    ProcessRow,
    RunRow,
    StageRow,
    StepColumns,
    StepMarks,
    StepRow,
    StepState,
    UnfinishedRank,
    attempts,
    processes,
    runs,
    stages,
    steps,
)

__all__ = [
    "STEP_ROWS", "TABLES", "ArtifactRow", "AttemptColumns", "AttemptRow", "AuditEntry",
    "CanaryRow", "CanarySequence", "CanaryVerdictRow", "CaptureRow", "DumpRow", "FindingRow",
    "FiringRow", "LossRow", "MetaRow", "OddReplicaRow", "OperatorTableRow", "PayloadRow",
    "ProcessColumns", "ProcessRow", "RegisteredEngine", "RunRow", "SampleRow", "ScalarRow",
    "StackRow", "StageRow", "StepColumns", "StepMarks", "StepMetricsRow", "StepRow", "StepState",
    "StreamRow", "SummaryRow", "Thread", "TriggerRulesRow", "UnfinishedRank", "WeightManifestRow",
    "WeightVerdictRow", "WeightsRow", "artifacts", "attempts", "audit", "canaries",
    "canary_verdicts", "captures", "dumps", "engines", "findings", "firings", "losses", "meta",
    "metadata", "odd_replicas", "operators", "payloads", "processes", "runs", "samples", "scalars",
    "stacks", "stages", "step_metrics", "step_rows", "steps", "streams", "summaries",
    "trigger_rules", "weight_manifests", "weight_verdicts", "weights",
]  # fmt: skip

TABLES: Final = {
    name: table
    for name, table in (*metadata.tables.items(), *views.tables.items())
    if table.name not in COMPACT
}
"""The tables that are written and read by their names; `compact` tables are behind views."""

STEP_ROWS: Final = (
    "stages", "scalars", "payloads", "summaries", "samples", "weights", "canaries",
    "artifacts",
)  # fmt: skip
"""The tables whose rows of old steps are removed; `artifacts` only once the file is gone."""


def step_rows(name: str, attempt_id: int, step: int) -> list[sa.ColumnElement[bool]]:
    """Return the condition of a step's rows in one of `STEP_ROWS`."""
    columns = TABLES[name].columns
    where = [columns["attempt_id"] == attempt_id, columns["step"] == step]
    return [*where, columns["deleted_wall"].is_not(None)] if name == "artifacts" else where
