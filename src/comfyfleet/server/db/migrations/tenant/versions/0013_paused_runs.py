"""Adds the time at which a graph run was paused."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Moment

revision = "paused_runs_1"
down_revision = "trouble_seconds_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("graph_runs", sa.Column("paused_at", Moment))


def downgrade() -> None:
    op.drop_column("graph_runs", "paused_at")
