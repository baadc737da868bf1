"""Adds the rules for prompts of fleets and tenants, the facts about backends, and calls to routes
of custom nodes."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Json, Moment

revision = "gateway_1"
down_revision = "schema_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("comfyui_fleets", sa.Column("gateway", Json))
    op.add_column("tenants", sa.Column("gateway", Json))
    op.add_column("comfyui_workers", sa.Column("object_info_hash", sa.String(64)))
    op.create_table(
        "route_calls",
        sa.Column("id", sa.Uuid, primary_key=True),
        sa.Column("tenant_id", sa.Uuid, nullable=False),
        sa.Column("fleet_ids", Json, nullable=False),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("method", sa.String(10), nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("headers", Json, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("worker_id", sa.String(200)),
        sa.Column("answer", Json),
        sa.Column("answer_body", sa.LargeBinary),
        sa.Column("created_at", Moment, nullable=False),
        sa.Column("expires_at", Moment, nullable=False),
        sa.CheckConstraint("status IN ('waiting', 'taken', 'answered')", name="status"),
    )
    op.create_index("route_calls_tenant_id_index", "route_calls", ["tenant_id"])
    op.create_index("route_calls_expires_at_index", "route_calls", ["expires_at"])


def downgrade() -> None:
    op.drop_table("route_calls")
    op.drop_column("comfyui_workers", "object_info_hash")
    op.drop_column("tenants", "gateway")
    op.drop_column("comfyui_fleets", "gateway")
