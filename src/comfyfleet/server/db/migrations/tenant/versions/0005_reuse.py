"""Adds the reuse of results, the retention of their files, and deadlines of graph runs."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Moment

revision = "reuse_1"
down_revision = "console_1"
branch_labels = None
depends_on = None

REUSABLE = sa.text("fingerprint IS NOT NULL AND status = 'completed'")


def upgrade() -> None:
    op.add_column("ai_jobs", sa.Column("fingerprint", sa.String(64)))
    op.add_column("ai_jobs", sa.Column("reused_from", sa.Uuid))
    op.add_column("files", sa.Column("kept_from", Moment))
    op.add_column("graph_runs", sa.Column("deadline_at", Moment))
    op.create_index(
        "ai_jobs_reusable",
        "ai_jobs",
        ["tenant_id", "user_id", "fingerprint", "completed_at"],
        postgresql_where=REUSABLE,
        sqlite_where=REUSABLE,
    )


def downgrade() -> None:
    op.drop_index("ai_jobs_reusable", "ai_jobs")
    op.drop_column("graph_runs", "deadline_at")
    op.drop_column("files", "kept_from")
    op.drop_column("ai_jobs", "reused_from")
    op.drop_column("ai_jobs", "fingerprint")
