"""How many tokens of a step count, and how many are unequal: which steps are exact."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

Int = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    for name in ("tokens", "masked_tokens", "unequal_tokens"):
        op.add_column("step_metrics", sa.Column(name, Int))
