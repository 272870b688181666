"""Which steps lost their rows to retention."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    flag = sa.Boolean().with_variant(sa.Integer(), "sqlite")
    op.add_column("steps", sa.Column("rows_removed", flag))
    where = sa.text("rows_removed IS NOT TRUE AND pinned IS NOT TRUE")
    op.create_index(
        "ix_steps_removable",
        "steps",
        ["attempt_id", "step"],
        sqlite_where=where,
        postgresql_where=where,
    )
