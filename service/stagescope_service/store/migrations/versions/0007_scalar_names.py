"""Which scalars an attempt logged, and since which step: without reading what each rank logged."""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_scalars_attempt_id_name_step", "scalars", ["attempt_id", "name", "step"])
