"""Adds settings of workflows: whether a result must have a file, and how AI files are marked."""

import sqlalchemy as sa
from alembic import op

revision = "outputs_1"
down_revision = "backend_problem_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    output = sa.Column("output", sa.String(10), nullable=False, server_default="required")
    op.add_column("workflows", output)
    ai_mark = sa.Column("ai_mark", sa.String(10), nullable=False, server_default="auto")
    op.add_column("workflows", ai_mark)


def downgrade() -> None:
    op.drop_column("workflows", "ai_mark")
    op.drop_column("workflows", "output")
