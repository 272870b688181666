"""The tables of the catalogue, as they were first released.

A migration keeps the tables as they were at its time, so it takes nothing from `store.tables`.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = None
branch_labels = None
depends_on = None

Int = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Real: sa.types.TypeEngine[float] = sa.Double().with_variant(sa.REAL(), "sqlite")
Flag = sa.Boolean().with_variant(sa.Integer(), "sqlite")
Text = sa.Text()
Blob = sa.LargeBinary()


def key(name: str, kind: Any, *, autoincrement: bool = False) -> sa.Column[object]:
    return sa.Column(name, kind, autoincrement=autoincrement, nullable=False)


def columns(kind: Any, names: str) -> list[sa.Column[object]]:
    return [sa.Column(name, kind) for name in names.split()]


def index(name: str, table: str, names: list[str], *, where: str) -> None:
    rows = sa.text(where)
    op.create_index(name, table, names, sqlite_where=rows, postgresql_where=rows)


def upgrade() -> None:
    op.create_table(
        "findings",
        key("finding_id", Text),
        *columns(Text, "run"),
        *columns(Int, "attempt_id step"),
        *columns(Text, "stage role"),
        *columns(Int, "rank"),
        *columns(Text, "kind severity message evidence advice"),
        *columns(Real, "first_wall last_wall"),
        *columns(Int, "count"),
        *columns(Real, "over_wall"),
        sa.PrimaryKeyConstraint("finding_id", name="pk_findings"),
        sqlite_strict=True,
    )
    op.create_index("ix_findings_attempt_id_step", "findings", ["attempt_id", "step"])
    op.create_index("ix_findings_run", "findings", ["run"])
    op.create_table(
        "losses",
        key("loss_id", Text),
        *columns(Text, "run"),
        *columns(Int, "attempt_id"),
        *columns(Text, "role"),
        *columns(Int, "rank step"),
        *columns(Text, "stage kind reason"),
        *columns(Int, "count bytes"),
        *columns(Real, "wall"),
        sa.PrimaryKeyConstraint("loss_id", name="pk_losses"),
        sqlite_strict=True,
    )
    op.create_index("ix_losses_attempt_id_step", "losses", ["attempt_id", "step"])
    op.create_index("ix_losses_run", "losses", ["run"])
    op.create_table(
        "stacks",
        key("incarnation", Text),
        key("request_id", Text),
        *columns(Int, "attempt_id step policy_version"),
        *columns(Text, "stage role"),
        *columns(Int, "rank occurrence epoch minibatch microbatch"),
        *columns(Text, "source state reason by"),
        *columns(Real, "wall deadline_wall answered_wall"),
        *columns(Text, "threads"),
        *columns(Flag, "truncated"),
        sa.PrimaryKeyConstraint("incarnation", "request_id", name="pk_stacks"),
        sqlite_strict=True,
    )
    index("ix_stacks_asked", "stacks", ["incarnation"], where="state = 'asked'")
    op.create_index("ix_stacks_attempt_id_step", "stacks", ["attempt_id", "step"])
    op.create_index("ix_stacks_request_id", "stacks", ["request_id"])
    op.create_table(
        "trigger_rules",
        key("revision", Int),
        *columns(Real, "wall"),
        *columns(Text, "by source digest document since"),
        sa.PrimaryKeyConstraint("revision", name="pk_trigger_rules"),
        sqlite_strict=True,
    )
    op.create_table(
        "firings",
        key("attempt_id", Int),
        key("step", Int),
        key("rule", Text),
        *columns(Text, "run"),
        *columns(Int, "revision"),
        *columns(Text, "stage role"),
        *columns(Int, "rank round"),
        *columns(Text, "message evidence actions"),
        *columns(Real, "wall acted_wall withdrawn_wall"),
        sa.PrimaryKeyConstraint("attempt_id", "step", "rule", name="pk_firings"),
        sqlite_strict=True,
    )
    op.create_index("ix_firings_run", "firings", ["run"])
    op.create_table(
        "scalars",
        key("incarnation", Text),
        key("work_key", Text),
        key("name", Text),
        *columns(Int, "attempt_id step policy_version"),
        *columns(Text, "stage role"),
        *columns(Int, "rank occurrence epoch minibatch microbatch"),
        *columns(Real, "value"),
        *columns(Text, "nonfinite"),
        *columns(Real, "wall"),
        sa.PrimaryKeyConstraint("incarnation", "work_key", "name", name="pk_scalars"),
        sqlite_strict=True,
    )
    op.create_index("ix_scalars_attempt_id_name_step", "scalars", ["attempt_id", "name", "step"])
    op.create_index("ix_scalars_attempt_id_step", "scalars", ["attempt_id", "step"])
    op.create_table(
        "payloads",
        key("incarnation", Text),
        key("seq", Int),
        *columns(Int, "attempt_id step policy_version"),
        *columns(Text, "stage role"),
        *columns(Int, "rank occurrence epoch minibatch microbatch"),
        *columns(Text, "work_key state reason tensors meta"),
        *columns(Int, "bytes"),
        *columns(Text, "node_id"),
        *columns(Real, "announced_wall settled_wall"),
        *columns(Text, "digest"),
        *columns(Int, "consumed_step"),
        sa.PrimaryKeyConstraint("incarnation", "seq", name="pk_payloads"),
        sqlite_strict=True,
    )
    index("ix_payloads_announced", "payloads", ["node_id"], where="state = 'announced'")
    op.create_index("ix_payloads_attempt_id_step", "payloads", ["attempt_id", "step"])
    index(
        "ix_payloads_stepless", "payloads", ["attempt_id", "policy_version"], where="step IS NULL"
    )
    op.create_table(
        "summaries",
        key("incarnation", Text),
        key("seq", Int),
        key("pair", Text),
        *columns(Int, "attempt_id step policy_version"),
        *columns(Text, "stage role"),
        *columns(Int, "rank occurrence epoch minibatch microbatch data_rank"),
        *columns(Blob, "summary"),
        sa.PrimaryKeyConstraint("incarnation", "seq", "pair", name="pk_summaries"),
        sqlite_strict=True,
    )
    op.create_index("ix_summaries_attempt_id_step", "summaries", ["attempt_id", "step"])
    op.create_table(
        "step_metrics",
        key("attempt_id", Int),
        key("step", Int),
        *columns(Int, "version"),
        *columns(Real, "whole_wall"),
        *columns(Text, "stage verdict suspects metrics"),
        *columns(Blob, "slices"),
        *columns(Int, "tokens masked_tokens unequal_tokens"),
        sa.PrimaryKeyConstraint("attempt_id", "step", name="pk_step_metrics"),
        sqlite_strict=True,
    )
    op.create_table(
        "streams",
        key("attempt_id", Int),
        key("stream", Text),
        key("role", Text),
        key("stage", Text),
        *columns(Text, "producer engine engine_version dtype dtypes quantisation"),
        *columns(Flag, "processed"),
        *columns(Real, "temperature top_p"),
        *columns(Int, "top_k"),
        *columns(Text, "alignment routing extra"),
        sa.PrimaryKeyConstraint("attempt_id", "stream", "role", "stage", name="pk_streams"),
        sqlite_strict=True,
    )
    op.create_table(
        "samples",
        key("attempt_id", Int),
        key("clock", Text),
        key("sample_uid", Text),
        *columns(Int, "step policy_version"),
        *columns(Text, "group_id"),
        *columns(Int, "sample_index"),
        *columns(Text, "split data_source prompt_hash tokens_hash policy_versions"),
        *columns(Int, "consumed_step"),
        *columns(Real, "reward"),
        *columns(Int, "tokens rounds"),
        sa.PrimaryKeyConstraint("attempt_id", "clock", "sample_uid", name="pk_samples"),
        sqlite_strict=True,
    )
    op.create_index("ix_samples_attempt_id_step", "samples", ["attempt_id", "step"])
    op.create_table(
        "weights",
        key("incarnation", Text),
        key("seq", Int),
        *columns(Int, "attempt_id step version"),
        *columns(Text, "side kind role"),
        *columns(Int, "rank"),
        *columns(Real, "wall"),
        *columns(Blob, "checksums"),
        *columns(Text, "manifest device_kind"),
        *columns(Int, "device_index"),
        *columns(Text, "device_serial"),
        sa.PrimaryKeyConstraint("incarnation", "seq", name="pk_weights"),
        sqlite_strict=True,
    )
    op.create_index("ix_weights_attempt_id_step", "weights", ["attempt_id", "step"])
    op.create_index("ix_weights_attempt_id_version", "weights", ["attempt_id", "version"])
    op.create_table(
        "weight_manifests",
        key("manifest", Text),
        *columns(Blob, "tensors"),
        sa.PrimaryKeyConstraint("manifest", name="pk_weight_manifests"),
        sqlite_strict=True,
    )
    op.create_table(
        "weight_verdicts",
        key("attempt_id", Int),
        key("version", Int),
        *columns(Int, "step records agree differ missing not_comparable replicas_differ"),
        *columns(Flag, "complete"),
        *columns(Text, "ranks names"),
        *columns(Real, "wall"),
        sa.PrimaryKeyConstraint("attempt_id", "version", name="pk_weight_verdicts"),
        sqlite_strict=True,
    )
    op.create_table(
        "odd_replicas",
        key("attempt_id", Int),
        key("version", Int),
        key("side", Text),
        key("role", Text),
        key("rank", Int),
        *columns(Text, "run"),
        *columns(Int, "step"),
        *columns(Text, "device host node_id device_kind"),
        *columns(Int, "device_index"),
        *columns(Text, "device_serial"),
        *columns(Flag, "is_outvoted"),
        *columns(Int, "replicas tensors"),
        *columns(Text, "names"),
        *columns(Real, "wall"),
        sa.PrimaryKeyConstraint(
            "attempt_id", "version", "side", "role", "rank", name="pk_odd_replicas"
        ),
        sqlite_strict=True,
    )
    op.create_index("ix_odd_replicas_device", "odd_replicas", ["device"])
    op.create_table(
        "captures",
        key("capture_id", Text),
        *columns(Text, "run spec state by"),
        *columns(Real, "created_wall removed_wall"),
        *columns(Text, "removed_by"),
        *columns(Int, "revision"),
        sa.PrimaryKeyConstraint("capture_id", name="pk_captures"),
        sqlite_strict=True,
    )
    op.create_table(
        "dumps",
        key("incarnation", Text),
        key("work_key", Text),
        key("capture_id", Text),
        *columns(Int, "attempt_id step policy_version"),
        *columns(Text, "stage role"),
        *columns(Int, "rank occurrence epoch minibatch microbatch"),
        *columns(Text, "path node_id state"),
        *columns(Int, "bytes files"),
        *columns(Real, "seconds"),
        *columns(Text, "task level error overrides estimate"),
        *columns(Real, "wall"),
        sa.PrimaryKeyConstraint("incarnation", "work_key", "capture_id", name="pk_dumps"),
        sqlite_strict=True,
    )
    index("ix_dumps_armed", "dumps", ["incarnation"], where="state = 'armed'")
    op.create_index("ix_dumps_attempt_id_step", "dumps", ["attempt_id", "step"])
    op.create_table(
        "operators",
        key("incarnation", Text),
        key("work_key", Text),
        key("capture_id", Text),
        *columns(Int, "attempt_id step policy_version"),
        *columns(Text, "stage role"),
        *columns(Int, "rank occurrence epoch minibatch microbatch"),
        *columns(Text, "node_id dump_path"),
        *columns(Real, "announced_wall"),
        *columns(Int, "mark digested_mark"),
        *columns(Flag, "truncated"),
        *columns(Text, "state reason path checksum task level"),
        *columns(Int, "bytes calls rows non_finite_rows truncated_at"),
        *columns(Flag, "done certain"),
        *columns(Text, "first_non_finite summary"),
        *columns(Real, "wall"),
        sa.PrimaryKeyConstraint("incarnation", "work_key", "capture_id", name="pk_operators"),
        sqlite_strict=True,
    )
    op.create_index("ix_operators_attempt_id_step", "operators", ["attempt_id", "step"])
    index(
        "ix_operators_undigested",
        "operators",
        ["node_id"],
        where="coalesce(digested_mark, -1) <> mark",
    )
    op.create_table(
        "artifacts",
        key("artifact_id", Text),
        *columns(Text, "incarnation"),
        *columns(Int, "seq attempt_id step"),
        *columns(Text, "stage role"),
        *columns(Int, "rank"),
        *columns(Text, "kind node_id path"),
        *columns(Int, "bytes"),
        *columns(Text, "checksum"),
        *columns(Flag, "shared pinned"),
        *columns(Real, "wall deleted_wall"),
        *columns(Int, "policy_version occurrence epoch minibatch microbatch"),
        *columns(Text, "sections tensors"),
        sa.PrimaryKeyConstraint("artifact_id", name="pk_artifacts"),
        sqlite_strict=True,
    )
    op.create_index("ix_artifacts_attempt_id_step", "artifacts", ["attempt_id", "step"])
    op.create_table(
        "engines",
        key("name", Text),
        *columns(Text, "url kind model version run by note"),
        *columns(Real, "wall"),
        *columns(Text, "settings"),
        sa.PrimaryKeyConstraint("name", name="pk_engines"),
        sqlite_strict=True,
    )
    op.create_table(
        "audit",
        key("audit_id", Int, autoincrement=True),
        *columns(Real, "wall"),
        *columns(Text, "by action detail"),
        sa.PrimaryKeyConstraint("audit_id", name="pk_audit"),
        sqlite_strict=True,
    )
    op.create_table(
        "meta",
        key("key", Text),
        *columns(Text, "value"),
        sa.PrimaryKeyConstraint("key", name="pk_meta"),
        sqlite_strict=True,
    )
    op.create_table(
        "runs",
        key("run", Text),
        *columns(Real, "created_wall"),
        *columns(Text, "settings"),
        sa.PrimaryKeyConstraint("run", name="pk_runs"),
        sqlite_strict=True,
    )
    op.create_table(
        "attempts",
        key("attempt_id", Int),
        *columns(Text, "run"),
        *columns(Int, "number"),
        *columns(Text, "key"),
        *columns(Real, "opened_wall ended_wall"),
        *columns(Text, "end_reason"),
        *columns(Int, "resumed_from_step first_step last_closed_step"),
        *columns(Text, "fingerprint"),
        *columns(Flag, "unkeyed"),
        sa.PrimaryKeyConstraint("attempt_id", name="pk_attempts"),
        sa.UniqueConstraint("run", "key", name="uq_attempts_run_key"),
        sa.UniqueConstraint("run", "number", name="uq_attempts_run_number"),
        sqlite_strict=True,
    )
    op.create_table(
        "processes",
        key("incarnation", Text),
        *columns(Int, "attempt_id"),
        *columns(Text, "role"),
        *columns(Int, "rank world_size data_rank"),
        *columns(Text, "node_id"),
        *columns(Int, "pid"),
        *columns(Text, "cluster node host device_kind"),
        *columns(Int, "device_index"),
        *columns(Text, "device_serial"),
        *columns(
            Int,
            "dp_rank dp_size tp_rank tp_size pp_rank pp_size vpp_rank vpp_size cp_rank "
            "cp_size sp_rank sp_size ep_rank ep_size etp_rank etp_size",
        ),
        *columns(Text, "engine engine_version framework framework_version settings hello"),
        *columns(Real, "first_wall last_wall clock_offset clock_error finished_wall lapsed_wall"),
        *columns(Int, "dropped_events dropped_payloads dropped_bytes"),
        *columns(Text, "dropped_seqs"),
        *columns(Flag, "raw unkeyed"),
        *columns(Int, "max_step plan_revision"),
        sa.PrimaryKeyConstraint("incarnation", name="pk_processes"),
        sqlite_strict=True,
    )
    op.create_index("ix_processes_attempt_id", "processes", ["attempt_id"])
    index(
        "ix_processes_live",
        "processes",
        ["last_wall"],
        where="finished_wall IS NULL AND lapsed_wall IS NULL",
    )
    op.create_table(
        "steps",
        key("attempt_id", Int),
        key("step", Int),
        *columns(Real, "opened_wall closed_wall"),
        *columns(Text, "close_reason completeness expected missing"),
        *columns(Int, "superseded_by"),
        *columns(Blob, "whole"),
        *columns(Real, "whole_wall"),
        *columns(Flag, "pinned"),
        *columns(Int, "parts_mark whole_mark"),
        sa.PrimaryKeyConstraint("attempt_id", "step", name="pk_steps"),
        sqlite_strict=True,
    )
    index("ix_steps_open", "steps", ["attempt_id"], where="closed_wall IS NULL")
    index("ix_steps_pinned", "steps", ["attempt_id"], where="pinned")
    index(
        "ix_steps_unformed", "steps", ["attempt_id"], where="coalesce(whole_mark, -1) <> parts_mark"
    )
    op.create_table(
        "stages",
        key("incarnation", Text),
        key("work_key", Text),
        key("revision", Int),
        *columns(Int, "attempt_id step policy_version"),
        *columns(Text, "stage role"),
        *columns(Int, "rank occurrence epoch minibatch microbatch begin_seq"),
        *columns(Real, "begin_wall begin_mono"),
        *columns(Int, "end_seq"),
        *columns(Real, "end_wall end_mono"),
        *columns(Flag, "device_time"),
        *columns(Real, "device_seconds clock_offset clock_error"),
        *columns(Text, "status error_type error_message"),
        *columns(Flag, "superseded"),
        *columns(Real, "begun_wall"),
        sa.PrimaryKeyConstraint("incarnation", "work_key", "revision", name="pk_stages"),
        sqlite_strict=True,
    )
    op.create_index("ix_stages_attempt_id_step", "stages", ["attempt_id", "step"])
    index("ix_stages_begun", "stages", ["begun_wall"], where="stage <> 'rollout_generate'")
    index("ix_stages_open", "stages", ["attempt_id"], where="end_wall IS NULL")
