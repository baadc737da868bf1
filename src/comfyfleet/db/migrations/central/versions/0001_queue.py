"""The queue: what it needs of the central database."""

from alembic import op

from comfyfleet.db.central import central

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    central.create_all(op.get_bind())
