"""How long the trouble of a pipeline run may last until only a person can help."""

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
