"""Adds a job's preferred worker, which is the worker of the client's previous prompt."""

import sqlalchemy as sa
from alembic import op

revision = "preferred_worker_1"
down_revision = "audit_sources_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ai_job_dispatches", sa.Column("preferred_worker_id", sa.String(200)))


def downgrade() -> None:
    op.drop_column("ai_job_dispatches", "preferred_worker_id")
