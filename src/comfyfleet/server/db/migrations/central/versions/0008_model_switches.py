"""Seconds of runs with and without a switch of models, by fleet, model and workflow."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Json, Moment

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

TABLE = "model_switches"


def upgrade() -> None:
    op.create_table(
        TABLE,
        sa.Column("fleet_id", sa.BigInteger(), nullable=False),
        sa.Column("model_key", sa.String(length=300), nullable=False),
        sa.Column("workflow_id", sa.BigInteger(), nullable=False),
        sa.Column("stayed", Json, nullable=False),
        sa.Column("switched", Json, nullable=False),
        sa.Column("updated_at", Moment(), nullable=False),
        sa.ForeignKeyConstraint(
            ["fleet_id"], ["comfyui_fleets.id"], name=op.f(f"{TABLE}_fleet_id_fkey")
        ),
        sa.ForeignKeyConstraint(
            ["workflow_id"], ["workflows.id"], name=op.f(f"{TABLE}_workflow_id_fkey")
        ),
        sa.PrimaryKeyConstraint("fleet_id", "model_key", "workflow_id", name=op.f(f"{TABLE}_pkey")),
    )
    op.create_index(op.f(f"{TABLE}_updated_at_index"), TABLE, ["updated_at"])
