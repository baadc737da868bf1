"""Graphs and pipelines can be deleted, and a candidate may be a text."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Moment

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("graphs", sa.Column("deleted_at", Moment(), nullable=True))
    op.add_column("pipelines", sa.Column("deleted_at", Moment(), nullable=True))
    op.add_column("pipeline_candidates", sa.Column("text", sa.Text(), nullable=True))
