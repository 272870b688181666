"""When a stage began on the service's clock: what the default run is chosen by."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

Real: sa.types.TypeEngine[float] = sa.Double().with_variant(sa.REAL(), "sqlite")


def upgrade() -> None:
    op.add_column("stages", sa.Column("begun_wall", Real))
    # What was stored before has no time of arrival: what it says of the future cannot be.
    now = "extract(epoch from now())"
    if op.get_bind().dialect.name == "sqlite":
        now = "(julianday('now') - 2440587.5) * 86400.0"
    begun = "begin_wall + coalesce(clock_offset, 0.0)"
    op.execute(
        f"UPDATE stages SET begun_wall = {begun} WHERE begin_wall IS NOT NULL AND {begun} <= {now}"
    )
    op.drop_index("ix_stages_training", "stages")
    training = sa.text("stage <> 'rollout_generate'")
    op.create_index(
        "ix_stages_begun",
        "stages",
        ["begun_wall"],
        sqlite_where=training,
        postgresql_where=training,
    )
