"""Orders on a live run, what they collected, and what is to be formed after a restart."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

Int = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _steps()


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
