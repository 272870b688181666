"""What a kept file holds, and long-lived engines."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

Int = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Real: sa.types.TypeEngine[float] = sa.Double().with_variant(sa.REAL(), "sqlite")
Text = sa.Text()


def upgrade() -> None:
    _kept()
    _engines()


def _engines() -> None:
    op.create_table(
        "engines",
        sa.Column("name", Text, autoincrement=False, nullable=False),
        sa.Column("url", Text),
        sa.Column("kind", Text),
        sa.Column("model", Text),
        sa.Column("version", Text),
        sa.Column("run", Text),
        sa.Column("by", Text),
        sa.Column("note", Text),
        sa.Column("wall", Real),
        sa.Column("settings", Text),
        sa.PrimaryKeyConstraint("name", name="pk_engines"),
        sqlite_strict=True,
    )


def _kept() -> None:
    for name in ("policy_version", "occurrence", "epoch", "minibatch", "microbatch"):
        op.add_column("artifacts", sa.Column(name, Int))
    for name in ("sections", "tensors"):
        op.add_column("artifacts", sa.Column(name, Text))
