"""Indexes for what was read of all of a run: its newest findings, payloads of a consumed step."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("ix_findings_attempt_id_step", "ix_findings_run"):
        op.drop_index(name, "findings")
    for columns in (
        ("attempt_id", "last_wall"),
        ("attempt_id", "step", "last_wall"),
        ("attempt_id", "kind", "last_wall"),
        ("run", "last_wall"),
        ("run", "step", "last_wall"),
        ("run", "kind", "severity", "count"),
    ):
        op.create_index(f"ix_findings_{'_'.join(columns)}", "findings", columns)
    where = sa.text("consumed_step IS NOT NULL")
    op.create_index(
        "ix_payload_rows_consumed",
        "payload_rows",
        ["consumed_step"],
        sqlite_where=where,
        postgresql_where=where,
    )
