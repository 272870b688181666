"""Orders on a live run, what they collected, and what is to be formed after a restart."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

Int = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Real: sa.types.TypeEngine[float] = sa.Double().with_variant(sa.REAL(), "sqlite")
Flag = sa.Boolean().with_variant(sa.Integer(), "sqlite")
Text = sa.Text()


def upgrade() -> None:
    _steps()
    _operators()
    _hangs()
    _triggers()
    _weights()


def _steps() -> None:
    op.add_column("steps", sa.Column("parts_mark", Int))
    op.add_column("steps", sa.Column("whole_mark", Int))
    unformed = sa.text("coalesce(whole_mark, -1) <> parts_mark")
    op.create_index(
        "ix_steps_unformed",
        "steps",
        ["attempt_id"],
        sqlite_where=unformed,
        postgresql_where=unformed,
    )


def _operators() -> None:
    armed = sa.text("state = 'armed'")
    op.create_index(
        "ix_dumps_armed", "dumps", ["incarnation"], sqlite_where=armed, postgresql_where=armed
    )
    keys = ("incarnation", "work_key", "capture_id")
    op.create_table(
        "operators",
        *(sa.Column(name, Text, autoincrement=False, nullable=False) for name in keys),
        sa.Column("attempt_id", Int),
        sa.Column("step", Int),
        sa.Column("policy_version", Int),
        sa.Column("stage", Text),
        sa.Column("role", Text),
        sa.Column("rank", Int),
        sa.Column("occurrence", Int),
        sa.Column("epoch", Int),
        sa.Column("minibatch", Int),
        sa.Column("microbatch", Int),
        sa.Column("node_id", Text),
        sa.Column("dump_path", Text),
        sa.Column("announced_wall", Real),
        sa.Column("mark", Int),
        sa.Column("digested_mark", Int),
        sa.Column("truncated", Flag),
        sa.Column("state", Text),
        sa.Column("reason", Text),
        sa.Column("path", Text),
        sa.Column("checksum", Text),
        sa.Column("task", Text),
        sa.Column("level", Text),
        sa.Column("bytes", Int),
        sa.Column("calls", Int),
        sa.Column("rows", Int),
        sa.Column("non_finite_rows", Int),
        sa.Column("truncated_at", Int),
        sa.Column("done", Flag),
        sa.Column("certain", Flag),
        sa.Column("first_non_finite", Text),
        sa.Column("summary", Text),
        sa.Column("wall", Real),
        sa.PrimaryKeyConstraint(*keys, name="pk_operators"),
        sqlite_strict=True,
    )
    op.create_index("ix_operators_attempt_id_step", "operators", ["attempt_id", "step"])
    undigested = sa.text("coalesce(digested_mark, -1) <> mark")
    op.create_index(
        "ix_operators_undigested",
        "operators",
        ["node_id"],
        sqlite_where=undigested,
        postgresql_where=undigested,
    )


def _hangs() -> None:
    op.add_column("findings", sa.Column("over_wall", Real))
    keys = ("incarnation", "request_id")
    op.create_table(
        "stacks",
        *(sa.Column(name, Text, autoincrement=False, nullable=False) for name in keys),
        sa.Column("attempt_id", Int),
        sa.Column("step", Int),
        sa.Column("policy_version", Int),
        sa.Column("stage", Text),
        sa.Column("role", Text),
        sa.Column("rank", Int),
        sa.Column("occurrence", Int),
        sa.Column("epoch", Int),
        sa.Column("minibatch", Int),
        sa.Column("microbatch", Int),
        sa.Column("source", Text),
        sa.Column("state", Text),
        sa.Column("reason", Text),
        sa.Column("by", Text),
        sa.Column("wall", Real),
        sa.Column("deadline_wall", Real),
        sa.Column("answered_wall", Real),
        sa.Column("threads", Text),
        sa.Column("truncated", Flag),
        sa.PrimaryKeyConstraint(*keys, name="pk_stacks"),
        sqlite_strict=True,
    )
    op.create_index("ix_stacks_attempt_id_step", "stacks", ["attempt_id", "step"])
    op.create_index("ix_stacks_request_id", "stacks", ["request_id"])
    asked = sa.text("state = 'asked'")
    op.create_index(
        "ix_stacks_asked", "stacks", ["incarnation"], sqlite_where=asked, postgresql_where=asked
    )


def _triggers() -> None:
    pinned = sa.text("pinned")
    op.create_index(
        "ix_steps_pinned", "steps", ["attempt_id"], sqlite_where=pinned, postgresql_where=pinned
    )
    op.create_table(
        "trigger_rules",
        sa.Column("revision", Int, autoincrement=False, nullable=False),
        sa.Column("wall", Real),
        sa.Column("by", Text),
        sa.Column("source", Text),
        sa.Column("digest", Text),
        sa.Column("document", Text),
        sa.Column("since", Text),
        sa.PrimaryKeyConstraint("revision", name="pk_trigger_rules"),
        sqlite_strict=True,
    )
    op.create_table(
        "firings",
        sa.Column("attempt_id", Int, autoincrement=False, nullable=False),
        sa.Column("step", Int, autoincrement=False, nullable=False),
        sa.Column("rule", Text, autoincrement=False, nullable=False),
        sa.Column("run", Text),
        sa.Column("revision", Int),
        sa.Column("stage", Text),
        sa.Column("role", Text),
        sa.Column("rank", Int),
        sa.Column("round", Int),
        sa.Column("message", Text),
        sa.Column("evidence", Text),
        sa.Column("actions", Text),
        sa.Column("wall", Real),
        sa.Column("acted_wall", Real),
        sa.Column("withdrawn_wall", Real),
        sa.PrimaryKeyConstraint("attempt_id", "step", "rule", name="pk_firings"),
        sqlite_strict=True,
    )
    op.create_index("ix_firings_run", "firings", ["run"])


def _weights() -> None:
    op.create_table(
        "weights",
        sa.Column("incarnation", Text, autoincrement=False, nullable=False),
        sa.Column("seq", Int, autoincrement=False, nullable=False),
        sa.Column("attempt_id", Int),
        sa.Column("step", Int),
        sa.Column("version", Int),
        sa.Column("side", Text),
        sa.Column("kind", Text),
        sa.Column("role", Text),
        sa.Column("rank", Int),
        sa.Column("wall", Real),
        sa.Column("checksums", sa.LargeBinary()),
        sa.Column("manifest", Text),
        sa.Column("device_kind", Text),
        sa.Column("device_index", Int),
        sa.Column("device_serial", Text),
        sa.PrimaryKeyConstraint("incarnation", "seq", name="pk_weights"),
        sqlite_strict=True,
    )
    op.create_index("ix_weights_attempt_id_version", "weights", ["attempt_id", "version"])
    op.create_index("ix_weights_attempt_id_step", "weights", ["attempt_id", "step"])
    op.create_table(
        "weight_manifests",
        sa.Column("manifest", Text, autoincrement=False, nullable=False),
        sa.Column("tensors", sa.LargeBinary()),
        sa.PrimaryKeyConstraint("manifest", name="pk_weight_manifests"),
        sqlite_strict=True,
    )
    op.create_table(
        "weight_verdicts",
        sa.Column("attempt_id", Int, autoincrement=False, nullable=False),
        sa.Column("version", Int, autoincrement=False, nullable=False),
        sa.Column("step", Int),
        sa.Column("records", Int),
        sa.Column("agree", Int),
        sa.Column("differ", Int),
        sa.Column("missing", Int),
        sa.Column("not_comparable", Int),
        sa.Column("replicas_differ", Int),
        sa.Column("complete", Flag),
        sa.Column("ranks", Text),
        sa.Column("names", Text),
        sa.Column("wall", Real),
        sa.PrimaryKeyConstraint("attempt_id", "version", name="pk_weight_verdicts"),
        sqlite_strict=True,
    )
    op.create_table(
        "odd_replicas",
        sa.Column("attempt_id", Int, autoincrement=False, nullable=False),
        sa.Column("version", Int, autoincrement=False, nullable=False),
        sa.Column("side", Text, autoincrement=False, nullable=False),
        sa.Column("role", Text, autoincrement=False, nullable=False),
        sa.Column("rank", Int, autoincrement=False, nullable=False),
        sa.Column("run", Text),
        sa.Column("step", Int),
        sa.Column("device", Text),
        sa.Column("host", Text),
        sa.Column("node_id", Text),
        sa.Column("device_kind", Text),
        sa.Column("device_index", Int),
        sa.Column("device_serial", Text),
        sa.Column("is_outvoted", Flag),
        sa.Column("replicas", Int),
        sa.Column("tensors", Int),
        sa.Column("names", Text),
        sa.Column("wall", Real),
        sa.PrimaryKeyConstraint(
            "attempt_id", "version", "side", "role", "rank", name="pk_odd_replicas"
        ),
        sqlite_strict=True,
    )
    op.create_index("ix_odd_replicas_device", "odd_replicas", ["device"])
