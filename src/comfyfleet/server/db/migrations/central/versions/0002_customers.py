"""Customers: what they need of the central database."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Json, Moment

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for make in TABLES:
        make()


def _api_keys() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("user_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("prefix", sa.String(length=20), nullable=False),
        sa.Column("scopes", Json, nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.Column("expires_at", Moment(), nullable=True),
        sa.Column("revoked_at", Moment(), nullable=True),
        sa.Column("last_used_at", Moment(), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("api_keys_tenant_id_fkey")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("api_keys_pkey")),
        sa.UniqueConstraint("key_hash", name=op.f("api_keys_key_hash_unique")),
    )
    op.create_index(
        op.f("api_keys_tenant_id_user_id_index"), "api_keys", ["tenant_id", "user_id"], unique=False
    )


def _effects() -> None:
    op.create_table(
        "effects",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("slug", sa.String(length=100), nullable=False),
        sa.Column("workflow_id", sa.BigInteger(), nullable=False),
        sa.Column("title", sa.String(length=200), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("preview_url", sa.Text(), nullable=True),
        sa.Column("price_tokens", sa.Integer(), nullable=False),
        sa.Column("overrides", Json, nullable=False),
        sa.Column("stage", sa.String(length=50), nullable=False),
        sa.Column("provider", sa.String(length=20), nullable=False),
        sa.Column("is_published", sa.Boolean(), nullable=False),
        sa.Column("max_upload_bytes", sa.BigInteger(), nullable=True),
        sa.Column("media_types", Json, nullable=False),
        sa.Column("last_processing_time_seconds", sa.Float(), nullable=True),
        sa.Column("typical_seconds", sa.Float(), nullable=True),
        sa.Column("created_at", Moment(), nullable=False),
        sa.CheckConstraint(
            "provider IN ('self_hosted', 'cloud')", name=op.f("effects_provider_check")
        ),
        sa.CheckConstraint("price_tokens >= 0", name=op.f("effects_price_tokens_check")),
        sa.ForeignKeyConstraint(
            ["workflow_id"], ["workflows.id"], name=op.f("effects_workflow_id_fkey")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("effects_pkey")),
        sa.UniqueConstraint("slug", name=op.f("effects_slug_unique")),
    )
    op.create_index(op.f("effects_workflow_id_index"), "effects", ["workflow_id"], unique=False)


def _tenants() -> None:
    op.add_column("tenants", sa.Column("retention_days", sa.Integer(), nullable=True))
    op.add_column("tenants", sa.Column("erasing_at", Moment(), nullable=True))
    op.add_column("tenants", sa.Column("erased_at", Moment(), nullable=True))


TABLES = (
    _tenants,
    _api_keys,
    _effects,
)
