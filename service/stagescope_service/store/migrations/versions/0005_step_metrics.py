"""The published numbers of each step, for series over many steps."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

Int = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Real: sa.types.TypeEngine[float] = sa.Double().with_variant(sa.REAL(), "sqlite")
Text = sa.Text()


def upgrade() -> None:
    op.create_table(
        "step_metrics",
        sa.Column("attempt_id", Int, autoincrement=False, nullable=False),
        sa.Column("step", Int, autoincrement=False, nullable=False),
        sa.Column("version", Int),
        sa.Column("whole_wall", Real),
        sa.Column("stage", Text),
        sa.Column("verdict", Text),
        sa.Column("suspects", Text),
        sa.Column("metrics", Text),
        sa.Column("slices", sa.LargeBinary()),
        sa.PrimaryKeyConstraint("attempt_id", "step", name="pk_step_metrics"),
        sqlite_strict=True,
    )
