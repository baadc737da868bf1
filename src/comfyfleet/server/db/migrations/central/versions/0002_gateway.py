"""What prompts may run on a fleet, what those of a tenant may use, and what each worker's backend offers."""

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
    op.add_column("comfyui_workers", sa.Column("object_info_hash", sa.String(64)))


def downgrade() -> None:
    op.drop_column("comfyui_workers", "object_info_hash")
    op.drop_column("tenants", "gateway")
    op.drop_column("comfyui_fleets", "gateway")
