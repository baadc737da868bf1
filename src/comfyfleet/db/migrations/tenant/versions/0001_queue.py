"""The queue: what it needs of the tenant database."""

from alembic import op

from comfyfleet.db.tenant import tenant

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    tenant.create_all(op.get_bind())
