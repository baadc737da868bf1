"""Adds route calls to a specific worker, and the workers that accepted a user's last upload."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Json, Moment

revision = "route_targets_1"
down_revision = "preferred_worker_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("route_calls", sa.Column("for_worker_id", sa.String(200)))
    op.add_column(
        "route_calls",
        sa.Column("is_copy", sa.Boolean, nullable=False, server_default=sa.text("false")),
    )
    op.create_table(
        "backend_uploads",
        sa.Column("tenant_id", sa.Uuid, primary_key=True),
        sa.Column("user_id", sa.Uuid, primary_key=True),
        sa.Column("worker_ids", Json, nullable=False),
        sa.Column("accepted_at", Moment, nullable=False),
    )
    op.create_index("backend_uploads_accepted_at_index", "backend_uploads", ["accepted_at"])


def downgrade() -> None:
    op.drop_table("backend_uploads")
    op.drop_column("route_calls", "is_copy")
    op.drop_column("route_calls", "for_worker_id")
