"""Adds the run log row with which an attempt of a prompt started."""

import sqlalchemy as sa
from alembic import op

revision = "shown_order_1"
down_revision = "paused_runs_1"
branch_labels = None
depends_on = None

INDEX, FIRST_ROWS = "run_events_attempt", sa.text("start_id = 0")


def upgrade() -> None:
    op.add_column("run_events", sa.Column("start_id", sa.BigInteger))
    op.create_index(
        INDEX,
        "run_events",
        ["job_id", "lease_number"],
        postgresql_where=FIRST_ROWS,
        sqlite_where=FIRST_ROWS,
    )


def downgrade() -> None:
    op.drop_index(INDEX, "run_events")
    op.drop_column("run_events", "start_id")
