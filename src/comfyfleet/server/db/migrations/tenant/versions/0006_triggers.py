"""Adds schedules and incoming webhooks that start runs, and their firings."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Document, Moment

revision = "triggers_1"
down_revision = "reuse_1"
branch_labels = None
depends_on = None

DUE = sa.text("next_at IS NOT NULL AND NOT is_paused")
STARTING = sa.text("status = 'starting'")


def upgrade() -> None:
    _create_triggers()
    _create_firings()


def _create_triggers() -> None:
    op.create_table(
        "triggers",
        sa.Column("id", sa.Uuid, primary_key=True),
        sa.Column("tenant_id", sa.Uuid, nullable=False),
        sa.Column("user_id", sa.Uuid, nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("graph_id", sa.Uuid),
        sa.Column("graph_version", sa.Integer),
        sa.Column("pipeline_id", sa.Uuid),
        sa.Column("base_candidates", sa.Integer),
        sa.Column("inputs", Document, nullable=False),
        sa.Column("cron", sa.String(100)),
        sa.Column("timezone", sa.String(64), nullable=False),
        sa.Column("catch_up", sa.Boolean, nullable=False),
        sa.Column("tokens_per_day", sa.BigInteger, nullable=False),
        sa.Column("max_tokens", sa.BigInteger),
        sa.Column("is_paused", sa.Boolean, nullable=False),
        sa.Column("next_at", Moment),
        sa.Column("missed", sa.Integer, nullable=False),
        sa.Column("missed_at", Moment),
        sa.Column("secret_number", sa.Integer, nullable=False),
        sa.Column("created_at", Moment, nullable=False),
        sa.CheckConstraint("kind IN ('schedule', 'webhook')", name="kind"),
    )
    op.create_index(
        "triggers_tenant_id_user_id_created_at_id_index",
        "triggers",
        ["tenant_id", "user_id", "created_at", "id"],
    )
    op.create_index(
        "triggers_due",
        "triggers",
        ["next_at"],
        postgresql_where=DUE,
        sqlite_where=DUE,
    )


def _create_firings() -> None:
    op.create_table(
        "trigger_firings",
        sa.Column("id", sa.Uuid, primary_key=True),
        sa.Column("tenant_id", sa.Uuid, nullable=False),
        sa.Column(
            "trigger_id", sa.Uuid, sa.ForeignKey("triggers.id", ondelete="CASCADE"), nullable=False
        ),
        sa.Column("cause", sa.String(20), nullable=False),
        sa.Column("planned_at", Moment),
        sa.Column("day", sa.String(10), nullable=False),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("granted_tokens", sa.BigInteger, nullable=False),
        sa.Column("inputs", Document),
        sa.Column("run_id", sa.Uuid),
        sa.Column("error_code", sa.String(50)),
        sa.Column("error", sa.Text),
        sa.Column("missed", sa.Integer, nullable=False),
        sa.Column("tries", sa.Integer, nullable=False),
        sa.Column("not_before", Moment, nullable=False),
        sa.Column("created_at", Moment, nullable=False),
        sa.Column("ended_at", Moment),
        sa.CheckConstraint("status IN ('starting', 'started', 'refused', 'missed')", name="status"),
    )
    op.create_index(
        "trigger_firings_trigger_id_created_at_id_index",
        "trigger_firings",
        ["trigger_id", "created_at", "id"],
    )
    op.create_index(
        "trigger_firings_trigger_id_day_index",
        "trigger_firings",
        ["trigger_id", "day"],
    )
    op.create_index(
        "trigger_firings_created_at_index",
        "trigger_firings",
        ["created_at"],
    )
    op.create_index(
        "trigger_firings_starting",
        "trigger_firings",
        ["not_before"],
        postgresql_where=STARTING,
        sqlite_where=STARTING,
    )


def downgrade() -> None:
    op.drop_table("trigger_firings")
    op.drop_table("triggers")
