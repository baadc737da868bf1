"""Adds the time until a person must resolve the problem of a pipeline run."""

import sqlalchemy as sa
from alembic import op

revision = "trouble_seconds_1"
down_revision = "cut_decisions_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("pipeline_runs", sa.Column("trouble_seconds", sa.Integer))


def downgrade() -> None:
    op.drop_column("pipeline_runs", "trouble_seconds")
