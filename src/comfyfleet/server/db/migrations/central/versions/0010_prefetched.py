"""An index for what workers have only prefetched, which is asked for at every idle poll."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    where = sa.text(
        "status = 'leased' AND is_prefetched AND NOT recall_requested AND started_at IS NULL"
    )
    op.create_index(
        "ai_job_dispatches_prefetched",
        "ai_job_dispatches",
        ["leased_at"],
        postgresql_where=where,
        sqlite_where=where,
    )
