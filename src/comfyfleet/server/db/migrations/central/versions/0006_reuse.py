"""Adds the setting that an effect's results may be reused."""

import sqlalchemy as sa
from alembic import op

revision = "reuse_1"
down_revision = "console_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    reuse = sa.Column("reuse", sa.Boolean, nullable=False, server_default=sa.text("false"))
    op.add_column("effects", reuse)


def downgrade() -> None:
    op.drop_column("effects", "reuse")
