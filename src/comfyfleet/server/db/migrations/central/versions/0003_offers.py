"""Workflows are offered to customers by a price of their own, and effects may lock values.

A workflow that never had a price was free in graphs by oversight: it is not offered any more.
"""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Json

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "workflows",
        sa.Column("is_offered", sa.Boolean(), server_default=sa.text("false"), nullable=False),
    )
    op.execute("UPDATE workflows SET is_offered = true WHERE price_tokens > 0")
    op.add_column("effects", sa.Column("locked", Json, server_default="[]", nullable=False))
