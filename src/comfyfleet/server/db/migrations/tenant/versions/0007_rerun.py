"""Adds reruns of graph runs, with their earlier run, start node and changes."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Document

revision = "rerun_1"
down_revision = "triggers_1"
branch_labels = None
depends_on = None

IS_RERUN = sa.text("rerun_of IS NOT NULL")


def upgrade() -> None:
    op.add_column("graph_runs", sa.Column("rerun_of", sa.Uuid))
    op.add_column("graph_runs", sa.Column("rerun", Document))
    op.create_index(
        "graph_runs_reruns",
        "graph_runs",
        ["rerun_of"],
        postgresql_where=IS_RERUN,
        sqlite_where=IS_RERUN,
    )


def downgrade() -> None:
    op.drop_index("graph_runs_reruns", "graph_runs")
    op.drop_column("graph_runs", "rerun")
    op.drop_column("graph_runs", "rerun_of")
