"""Adds an index for ended jobs by effect, and allows ties between two candidates."""

import sqlalchemy as sa
from alembic import op

revision = "console_1"
down_revision = "shares_1"
branch_labels = None
depends_on = None

ENDED = sa.text("effect_id IS NOT NULL AND completed_at IS NOT NULL")
RARE = sa.text("effect_id IS NOT NULL AND status IN ('failed', 'cancelled')")


def upgrade() -> None:
    op.create_index(
        "ai_jobs_ended_of_effect",
        "ai_jobs",
        ["effect_id", "submitted_at", "id"],
        postgresql_where=ENDED,
        sqlite_where=ENDED,
    )
    op.create_index(
        "ai_jobs_rare_of_effect",
        "ai_jobs",
        ["effect_id", "status", "submitted_at", "id"],
        postgresql_where=RARE,
        sqlite_where=RARE,
    )
    is_tie = sa.Column("is_tie", sa.Boolean, nullable=False, server_default=sa.text("false"))
    op.add_column("pipeline_votes", is_tie)


def downgrade() -> None:
    op.drop_column("pipeline_votes", "is_tie")
    op.drop_index("ai_jobs_rare_of_effect", "ai_jobs")
    op.drop_index("ai_jobs_ended_of_effect", "ai_jobs")
