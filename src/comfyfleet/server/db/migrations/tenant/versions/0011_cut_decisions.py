"""Adds the point at which the last decision about a graph run stopped early."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Document

revision = "cut_decisions_1"
down_revision = "delivery_keys_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("graph_runs", sa.Column("cut", Document))


def downgrade() -> None:
    op.drop_column("graph_runs", "cut")
