"""The queue: what it needs of a tenant pool."""

from typing import Any

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Document, Json, Moment, RowId

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    for make in TABLES:
        make()


def _ai_jobs() -> None:
    op.create_table(
        "ai_jobs",
        *_ai_jobs_asked(),
        *_ai_jobs_happened(),
        sa.CheckConstraint(
            "status IN ('queued', 'processing', 'completed', 'failed', 'cancelled')",
            name=op.f("ai_jobs_status_check"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("ai_jobs_pkey")),
        sa.UniqueConstraint(
            "tenant_id", "idempotency_key", name=op.f("ai_jobs_tenant_id_idempotency_key_unique")
        ),
    )
    _ai_jobs_indexes()


def _ai_jobs_asked() -> list[sa.Column[Any]]:
    return [
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("user_id", sa.Uuid(), nullable=True),
        sa.Column("effect_id", sa.Uuid(), nullable=True),
        sa.Column("workflow_id", sa.BigInteger(), nullable=False),
        sa.Column("workflow_slug", sa.String(length=100), nullable=False),
        sa.Column("workflow_version", sa.Integer(), nullable=False),
        sa.Column("stage", sa.String(length=50), nullable=False),
        sa.Column("provider", sa.String(length=20), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("backend_affinity", sa.String(length=300), nullable=True),
        sa.Column("model_key", sa.String(length=300), nullable=True),
        sa.Column("model_set", sa.String(length=64), nullable=True),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("prompt", Document, nullable=False),
        sa.Column("properties", Json, nullable=False),
        sa.Column("assets", Json, nullable=False),
    ]


def _ai_jobs_happened() -> list[sa.Column[Any]]:
    return [
        sa.Column("output_node_id", sa.String(length=200), nullable=True),
        sa.Column("input_file_id", sa.Uuid(), nullable=True),
        sa.Column("output_file_id", sa.Uuid(), nullable=True),
        sa.Column("provider_job_id", sa.String(length=200), nullable=True),
        sa.Column("result_metadata", Json, nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("raw_error", sa.Text(), nullable=True),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("lease_number", sa.Integer(), server_default="0", nullable=False),
        sa.Column("lease_token", sa.Uuid(), nullable=True),
        sa.Column("reserved_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("retry_of", sa.Uuid(), nullable=True),
        sa.Column("idempotency_key", sa.String(length=200), nullable=True),
        sa.Column("request_hash", sa.String(length=64), nullable=True),
        sa.Column("submitted_at", Moment(), nullable=False),
        sa.Column("started_at", Moment(), nullable=True),
        sa.Column("completed_at", Moment(), nullable=True),
    ]


def _ai_jobs_indexes() -> None:
    op.create_index(
        "ai_jobs_active",
        "ai_jobs",
        ["tenant_id", "id"],
        unique=False,
        postgresql_where=sa.text("status IN ('queued', 'processing')"),
        sqlite_where=sa.text("status IN ('queued', 'processing')"),
    )
    op.create_index(
        op.f("ai_jobs_tenant_id_submitted_at_id_index"),
        "ai_jobs",
        ["tenant_id", "submitted_at", "id"],
        unique=False,
    )


def _files() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("user_id", sa.Uuid(), nullable=True),
        sa.Column("disk", sa.String(length=20), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("filename", sa.String(length=300), nullable=False),
        sa.Column("mime_type", sa.String(length=200), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=True),
        sa.Column("content_hash", sa.String(length=64), nullable=True),
        sa.Column("metadata", Json, nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("files_pkey")),
    )
    op.create_index(
        op.f("files_tenant_id_content_hash_index"),
        "files",
        ["tenant_id", "content_hash"],
        unique=False,
    )


def _outbox() -> None:
    op.create_table(
        "outbox",
        sa.Column("id", RowId, nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.String(length=50), nullable=False),
        sa.Column("payload", Json, nullable=False),
        sa.Column("tries", sa.Integer(), server_default="0", nullable=False),
        sa.Column("not_before", Moment(), nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("outbox_pkey")),
    )
    op.create_index(
        op.f("outbox_not_before_id_index"), "outbox", ["not_before", "id"], unique=False
    )


TABLES = (
    _ai_jobs,
    _files,
    _outbox,
)
