"""Adds the keys that identify repeated deliveries to incoming webhooks."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Moment

revision = "delivery_keys_1"
down_revision = "run_log_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "trigger_delivery_keys",
        sa.Column(
            "trigger_id", sa.Uuid, sa.ForeignKey("triggers.id", ondelete="CASCADE"), nullable=False
        ),
        sa.Column("key_hash", sa.String(64), nullable=False),
        sa.Column(
            "firing_id",
            sa.Uuid,
            sa.ForeignKey("trigger_firings.id", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("created_at", Moment, nullable=False),
        sa.PrimaryKeyConstraint("trigger_id", "key_hash"),
    )
    op.create_index("trigger_delivery_keys_firing_id_index", "trigger_delivery_keys", ["firing_id"])


def downgrade() -> None:
    op.drop_table("trigger_delivery_keys")
