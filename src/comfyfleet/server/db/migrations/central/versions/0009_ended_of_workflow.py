"""An index for the ended dispatches of one workflow."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    where = sa.text("ended_at IS NOT NULL")
    op.create_index(
        "ai_job_dispatches_ended_of_workflow",
        "ai_job_dispatches",
        ["workflow_id", "id"],
        postgresql_where=where,
        sqlite_where=where,
    )
