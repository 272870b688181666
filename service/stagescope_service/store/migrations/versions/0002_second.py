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
        sa.Column("asked_wall", Real),
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
    op.create_table(
        "trigger_rules",
        sa.Column("revision", Int, autoincrement=False, nullable=False),
        sa.Column("wall", Real),
        sa.Column("by", Text),
        sa.Column("source", Text),
        sa.Column("digest", Text),
        sa.Column("document", Text),
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
