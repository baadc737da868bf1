"""Adds links with which users share results with people who have no key."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Moment

revision = "shares_1"
down_revision = "gateway_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "shares",
        sa.Column("id", sa.Uuid, primary_key=True),
        sa.Column("tenant_id", sa.Uuid, nullable=False),
        sa.Column("user_id", sa.Uuid, nullable=False),
        sa.Column("job_id", sa.Uuid, nullable=False),
        sa.Column("video_id", sa.Uuid),
        sa.Column("has_original", sa.Boolean, nullable=False),
        sa.Column("secret_hash", sa.String(64), nullable=False, unique=True),
        sa.Column("created_at", Moment, nullable=False),
        sa.Column("expires_at", Moment, nullable=False),
        sa.Column("revoked_at", Moment),
    )
    op.create_index(
        "shares_tenant_id_user_id_created_at_id_index",
        "shares",
        ["tenant_id", "user_id", "created_at", "id"],
    )
    op.create_index("shares_expires_at_index", "shares", ["expires_at"])


def downgrade() -> None:
    op.drop_table("shares")
