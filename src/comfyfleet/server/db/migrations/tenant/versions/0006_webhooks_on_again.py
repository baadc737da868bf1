"""A webhook that was switched off can be switched on again, and starts with a clean record."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Moment

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("webhooks", sa.Column("on_again_at", Moment(), nullable=True))
