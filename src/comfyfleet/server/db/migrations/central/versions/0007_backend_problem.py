"""Adds the reason why a worker's backend currently can't run jobs."""

import sqlalchemy as sa
from alembic import op

revision = "backend_problem_1"
down_revision = "reuse_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("comfyui_workers", sa.Column("backend_problem", sa.String(20)))


def downgrade() -> None:
    op.drop_column("comfyui_workers", "backend_problem")
