"""Operators by name, a quota of storage for each tenant, and indexes for what operators list."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Moment

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

DISPATCHES = "ai_job_dispatches"
ENDED = "ended_at IS NOT NULL"


def upgrade() -> None:
    op.add_column("tenants", sa.Column("max_storage_bytes", sa.BigInteger(), nullable=True))
    _operators()
    _part("ended_of_tenant", ["tenant_id", "id"], ENDED)
    _part("ended_of_worker", ["worker_id", "id"], ENDED)
    _part("rare", ["status", "id"], "status IN ('failed', 'cancelled')")
    _part("poisoned", ["id"], "is_poisoned")
    op.create_index("audit_log_actor_id_index", "audit_log", ["actor", "id"])
    op.create_index("audit_log_tenant_id_id_index", "audit_log", ["tenant_id", "id"])
    op.create_index("audit_log_at", "audit_log", ["at"], postgresql_using="brin")


def _part(name: str, columns: list[str], where: str) -> None:
    op.create_index(
        f"{DISPATCHES}_{name}",
        DISPATCHES,
        columns,
        postgresql_where=sa.text(where),
        sqlite_where=sa.text(where),
    )


def _operators() -> None:
    op.create_table(
        "operators",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("role", sa.String(20), nullable=False),
        sa.Column("key_hash", sa.String(64), nullable=False),
        sa.Column("prefix", sa.String(20), nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        sa.Column("revoked_at", Moment(), nullable=True),
        sa.Column("last_used_at", Moment(), nullable=True),
        sa.CheckConstraint(
            "role IN ('viewer', 'operator', 'owner')", name=op.f("operators_role_check")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("operators_pkey")),
        sa.UniqueConstraint("key_hash", name=op.f("operators_key_hash_unique")),
        sa.UniqueConstraint("name", name=op.f("operators_name_unique")),
    )
