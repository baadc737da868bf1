"""Adds the setting whether a tenant's users see machine names."""

import sqlalchemy as sa
from alembic import op

revision = "show_backends_1"
down_revision = "outputs_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("show_backends", sa.Boolean))


def downgrade() -> None:
    op.drop_column("tenants", "show_backends")
