"""Adds the time that a fleet's machines need to start on demand."""

import sqlalchemy as sa
from alembic import op

revision = "starts_within_1"
down_revision = "show_backends_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("comfyui_fleets", sa.Column("starts_within_seconds", sa.Integer))


def downgrade() -> None:
    op.drop_column("comfyui_fleets", "starts_within_seconds")
