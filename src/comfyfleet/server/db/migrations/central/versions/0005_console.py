"""Adds sums over time for the operators' charts."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Moment

revision = "console_1"
down_revision = "examples_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rollups",
        sa.Column("step_seconds", sa.Integer, primary_key=True),
        sa.Column("at", Moment, primary_key=True),
        sa.Column("name", sa.String(50), primary_key=True),
        sa.Column("value", sa.Float, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("rollups")
