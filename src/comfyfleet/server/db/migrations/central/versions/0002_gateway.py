"""What prompts may run on a fleet, and what those of a tenant may use."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Json

revision = "gateway_1"
down_revision = "schema_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("comfyui_fleets", sa.Column("gateway", Json))
    op.add_column("tenants", sa.Column("gateway", Json))


def downgrade() -> None:
    op.drop_column("tenants", "gateway")
    op.drop_column("comfyui_fleets", "gateway")
