"""What a finding says to look at, as data beside its advice."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("findings", sa.Column("see", sa.Text()))
