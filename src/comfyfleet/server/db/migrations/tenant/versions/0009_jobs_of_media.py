"""An index for the jobs of one media."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    where = sa.text("video_id IS NOT NULL")
    op.create_index(
        "ai_jobs_of_media",
        "ai_jobs",
        ["tenant_id", "video_id", "submitted_at"],
        postgresql_where=where,
        sqlite_where=where,
    )
