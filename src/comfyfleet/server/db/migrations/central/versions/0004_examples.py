"""Adds tags and examples of effects, and the durations of their recent runs."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Json

revision = "examples_1"
down_revision = "web_1"
branch_labels = None
depends_on = None
COLUMNS = ("tags", "examples", "recent_seconds")


def upgrade() -> None:
    for name in COLUMNS:
        op.add_column("effects", sa.Column(name, Json, nullable=False, server_default="[]"))


def downgrade() -> None:
    for name in reversed(COLUMNS):
        op.drop_column("effects", name)
