"""Indexes for the jobs of one workflow, of those that have ended."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    ended, rare = "completed_at IS NOT NULL", "status IN ('failed', 'cancelled')"
    for name, columns, where in (
        ("ended_of_workflow", ["workflow_slug", "submitted_at", "id"], ended),
        ("rare_of_workflow", ["workflow_slug", "status", "submitted_at", "id"], rare),
    ):
        op.create_index(
            f"ai_jobs_{name}",
            "ai_jobs",
            columns,
            postgresql_where=sa.text(where),
            sqlite_where=sa.text(where),
        )
