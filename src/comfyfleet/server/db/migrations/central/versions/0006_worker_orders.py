"""Orders to workers: revoked for good, a key on its way, approval by hand, leases lost unstarted."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Moment

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "comfyui_fleets",
        sa.Column("approval", sa.String(length=10), nullable=False, server_default="auto"),
    )
    op.add_column("comfyui_workers", sa.Column("revoked_at", Moment(), nullable=True))
    op.add_column("comfyui_workers", sa.Column("next_key", sa.String(length=100), nullable=True))
    op.add_column(
        "comfyui_workers", sa.Column("next_key_hash", sa.String(length=64), nullable=True)
    )
    op.create_index(
        op.f("comfyui_workers_next_key_hash_index"),
        "comfyui_workers",
        ["next_key_hash"],
        unique=True,
    )
    # Until now, a worker that was not approved had been revoked.
    op.execute("UPDATE comfyui_workers SET revoked_at = last_seen_at WHERE NOT is_approved")
    op.add_column(
        "ai_job_dispatches",
        sa.Column("lost_leases", sa.Integer(), nullable=False, server_default="0"),
    )
