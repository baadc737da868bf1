"""Adds browser sessions."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Moment

revision = "web_1"
down_revision = "gateway_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.Uuid, nullable=False),
        sa.Column("secret_hash", sa.String(64), nullable=False),
        sa.Column("created_at", Moment, nullable=False),
        sa.Column("expires_at", Moment, nullable=False),
        sa.Column("api_key_id", sa.Uuid),
        sa.Column("customer_until", Moment),
        sa.Column("operator_id", sa.Uuid),
        sa.Column("admin_proof", sa.String(64)),
        sa.Column("operator_until", Moment),
        sa.PrimaryKeyConstraint("id", name="sessions_pkey"),
        sa.UniqueConstraint("secret_hash", name="sessions_secret_hash_unique"),
        sa.ForeignKeyConstraint(
            ["api_key_id"], ["api_keys.id"], name="sessions_api_key_id_fkey", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["operator_id"],
            ["operators.id"],
            name="sessions_operator_id_fkey",
            ondelete="CASCADE",
        ),
    )
    for column in ("api_key_id", "operator_id", "expires_at"):
        op.create_index(f"sessions_{column}_index", "sessions", [column])


def downgrade() -> None:
    op.drop_table("sessions")
