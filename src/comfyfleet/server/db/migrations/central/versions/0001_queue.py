"""The queue: what it needs of the central database."""

from typing import Any

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Json, Moment, RowId

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    for make in TABLES:
        make()


def _audit_log() -> None:
    op.create_table(
        "audit_log",
        sa.Column("id", RowId, nullable=False),
        sa.Column("at", Moment(), nullable=False),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("action", sa.String(length=50), nullable=False),
        sa.Column("subject", sa.String(length=300), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=True),
        sa.Column("details", Json, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("audit_log_pkey")),
    )
    op.create_index(op.f("audit_log_action_id_index"), "audit_log", ["action", "id"], unique=False)
    op.create_index(
        op.f("audit_log_subject_id_index"), "audit_log", ["subject", "id"], unique=False
    )


def _control_state() -> None:
    op.create_table(
        "control_state",
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("value", Json, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("control_state_pkey")),
    )


def _tenants() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("pool", sa.String(length=100), nullable=False),
        sa.Column("min_priority", sa.Integer(), server_default="-10", nullable=False),
        sa.Column("max_priority", sa.Integer(), server_default="10", nullable=False),
        sa.Column("max_queued", sa.Integer(), nullable=True),
        sa.Column("created_at", Moment(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("tenants_pkey")),
    )


def _worker_readings() -> None:
    op.create_table(
        "worker_readings",
        sa.Column("id", RowId, nullable=False),
        sa.Column("worker_id", sa.String(length=200), nullable=False),
        sa.Column("at", Moment(), nullable=False),
        sa.Column("reading", Json, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("worker_readings_pkey")),
    )
    op.create_index(op.f("worker_readings_at_index"), "worker_readings", ["at"], unique=False)
    op.create_index(
        op.f("worker_readings_worker_id_at_index"),
        "worker_readings",
        ["worker_id", "at"],
        unique=False,
    )


def _workflows() -> None:
    op.create_table(
        "workflows",
        sa.Column("id", RowId, nullable=False),
        sa.Column("slug", sa.String(length=100), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("required_capabilities", Json, nullable=False),
        sa.Column("price_tokens", sa.Integer(), server_default="0", nullable=False),
        sa.Column("run_limit_seconds", sa.Integer(), server_default="3600", nullable=False),
        sa.Column("is_active", sa.Boolean(), nullable=False),
        sa.Column("is_paused", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("is_open", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("workflows_pkey")),
        sa.UniqueConstraint("slug", name=op.f("workflows_slug_unique")),
    )


def _ai_job_dispatches() -> None:
    op.create_table(
        "ai_job_dispatches",
        *_ai_job_dispatches_asked(),
        *_ai_job_dispatches_happened(),
        sa.CheckConstraint(
            "provider IN ('self_hosted', 'cloud')", name=op.f("ai_job_dispatches_provider_check")
        ),
        sa.CheckConstraint(
            "status IN ('queued', 'leased', 'completed', 'failed', 'cancelled')",
            name=op.f("ai_job_dispatches_status_check"),
        ),
        sa.CheckConstraint(
            "attempts <= max_attempts", name=op.f("ai_job_dispatches_attempts_check")
        ),
        sa.ForeignKeyConstraint(
            ["workflow_id"], ["workflows.id"], name=op.f("ai_job_dispatches_workflow_id_fkey")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("ai_job_dispatches_pkey")),
        sa.UniqueConstraint(
            "tenant_id",
            "tenant_job_id",
            name=op.f("ai_job_dispatches_tenant_id_tenant_job_id_unique"),
        ),
        postgresql_with={
            "fillfactor": "80",
            "autovacuum_vacuum_scale_factor": "0.01",
            "autovacuum_vacuum_cost_delay": "0",
        },
    )
    _ai_job_dispatches_indexes()
    _ai_job_dispatches_more_indexes()


def _ai_job_dispatches_asked() -> list[sa.Column[Any]]:
    return [
        sa.Column("id", RowId, nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("tenant_job_id", sa.Uuid(), nullable=False),
        sa.Column("workflow_id", sa.BigInteger(), nullable=False),
        sa.Column("stage", sa.String(length=50), server_default="production", nullable=False),
        sa.Column("provider", sa.String(length=20), nullable=False),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("max_attempts", sa.Integer(), server_default="3", nullable=False),
        sa.Column("requeues", sa.Integer(), server_default="0", nullable=False),
        sa.Column("lease_number", sa.Integer(), server_default="0", nullable=False),
        sa.Column("lease_token", sa.Uuid(), nullable=True),
        sa.Column("lease_expires_at", Moment(), nullable=True),
        sa.Column("worker_id", sa.String(length=200), nullable=True),
        sa.Column("not_before", Moment(), nullable=True),
    ]


def _ai_job_dispatches_happened() -> list[sa.Column[Any]]:
    return [
        sa.Column("avoid_worker_id", sa.String(length=200), nullable=True),
        sa.Column("avoid_until", Moment(), nullable=True),
        sa.Column("model_key", sa.String(length=300), nullable=True),
        sa.Column("model_set", sa.String(length=64), nullable=True),
        sa.Column("backend_affinity", sa.String(length=300), nullable=True),
        sa.Column("is_poisoned", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column(
            "cancel_requested", sa.Boolean(), server_default=sa.text("false"), nullable=False
        ),
        sa.Column(
            "recall_requested", sa.Boolean(), server_default=sa.text("false"), nullable=False
        ),
        sa.Column("is_prefetched", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("duration_seconds", sa.Float(), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("created_at", Moment(), nullable=False),
        sa.Column("queued_at", Moment(), nullable=False),
        sa.Column("leased_at", Moment(), nullable=True),
        sa.Column("started_at", Moment(), nullable=True),
        sa.Column("heard_at", Moment(), nullable=True),
        sa.Column("ended_at", Moment(), nullable=True),
    ]


def _ai_job_dispatches_indexes() -> None:
    op.create_index(
        "ai_job_dispatches_bound",
        "ai_job_dispatches",
        [
            "backend_affinity",
            "workflow_id",
            "stage",
            "provider",
            sa.literal_column("priority DESC"),
            "rank",
            "id",
        ],
        unique=False,
        postgresql_where=sa.text(
            "status = 'queued' AND not_before IS NULL AND backend_affinity IS NOT NULL"
        ),
        sqlite_where=sa.text(
            "status = 'queued' AND not_before IS NULL AND backend_affinity IS NOT NULL"
        ),
    )
    op.create_index(
        "ai_job_dispatches_due",
        "ai_job_dispatches",
        ["not_before"],
        unique=False,
        postgresql_where=sa.text("status = 'queued' AND not_before IS NOT NULL"),
        sqlite_where=sa.text("status = 'queued' AND not_before IS NOT NULL"),
    )
    op.create_index(
        "ai_job_dispatches_ended",
        "ai_job_dispatches",
        ["ended_at"],
        unique=False,
        postgresql_where=sa.text("ended_at IS NOT NULL"),
        sqlite_where=sa.text("ended_at IS NOT NULL"),
    )
    op.create_index(
        "ai_job_dispatches_expiry",
        "ai_job_dispatches",
        ["lease_expires_at"],
        unique=False,
        postgresql_where=sa.text("status = 'leased'"),
        sqlite_where=sa.text("status = 'leased'"),
    )


def _ai_job_dispatches_more_indexes() -> None:
    op.create_index(
        "ai_job_dispatches_held",
        "ai_job_dispatches",
        ["worker_id"],
        unique=False,
        postgresql_where=sa.text("status = 'leased'"),
        sqlite_where=sa.text("status = 'leased'"),
    )
    op.create_index(
        "ai_job_dispatches_lane",
        "ai_job_dispatches",
        ["workflow_id", "stage", "provider", sa.literal_column("priority DESC"), "rank", "id"],
        unique=False,
        postgresql_where=sa.text(
            "status = 'queued' AND not_before IS NULL AND backend_affinity IS NULL"
        ),
        sqlite_where=sa.text(
            "status = 'queued' AND not_before IS NULL AND backend_affinity IS NULL"
        ),
    )
    op.create_index(
        "ai_job_dispatches_share",
        "ai_job_dispatches",
        ["tenant_id", "workflow_id", "stage", "provider", "priority", "rank"],
        unique=False,
        postgresql_where=sa.text("status = 'queued'"),
        sqlite_where=sa.text("status = 'queued'"),
    )


def _comfyui_fleets() -> None:
    op.create_table(
        "comfyui_fleets",
        sa.Column("id", RowId, nullable=False),
        sa.Column("slug", sa.String(length=100), nullable=False),
        sa.Column("stage", sa.String(length=50), nullable=False),
        sa.Column("secret_hash", sa.String(length=64), nullable=False),
        sa.Column("max_workers", sa.Integer(), nullable=True),
        sa.Column("open_workflow_id", sa.BigInteger(), nullable=True),
        sa.Column("object_info_key", sa.Text(), nullable=True),
        sa.Column("object_info_hash", sa.String(length=64), nullable=True),
        sa.Column("created_at", Moment(), nullable=False),
        sa.ForeignKeyConstraint(
            ["open_workflow_id"],
            ["workflows.id"],
            name=op.f("comfyui_fleets_open_workflow_id_fkey"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("comfyui_fleets_pkey")),
        sa.UniqueConstraint("slug", "stage", name=op.f("comfyui_fleets_slug_stage_unique")),
    )


def _workflow_versions() -> None:
    op.create_table(
        "workflow_versions",
        sa.Column("workflow_id", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("document_key", sa.Text(), nullable=False),
        sa.Column("document_hash", sa.String(length=64), nullable=False),
        sa.Column("properties", Json, nullable=False),
        sa.Column("output_node_id", sa.String(length=200), nullable=True),
        sa.Column("node_types", Json, nullable=False),
        sa.Column("models", Json, nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.ForeignKeyConstraint(
            ["workflow_id"], ["workflows.id"], name=op.f("workflow_versions_workflow_id_fkey")
        ),
        sa.PrimaryKeyConstraint("workflow_id", "version", name=op.f("workflow_versions_pkey")),
    )


def _comfyui_workers() -> None:
    op.create_table(
        "comfyui_workers",
        sa.Column("id", RowId, nullable=False),
        sa.Column("worker_id", sa.String(length=200), nullable=False),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("fleet_id", sa.BigInteger(), nullable=False),
        sa.Column("registration_source", sa.String(length=20), nullable=False),
        sa.Column("protocol_version", sa.Integer(), nullable=False),
        sa.Column("capabilities", Json, nullable=False),
        sa.Column("providers", Json, nullable=False),
        sa.Column("max_concurrency", sa.Integer(), nullable=False),
        sa.Column("current_load", sa.Integer(), server_default="0", nullable=False),
        sa.Column("is_approved", sa.Boolean(), nullable=False),
        sa.Column("is_draining", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("facts", Json, nullable=True),
        sa.Column("models_loaded", Json, nullable=False),
        sa.Column("last_seen_at", Moment(), nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.ForeignKeyConstraint(
            ["fleet_id"], ["comfyui_fleets.id"], name=op.f("comfyui_workers_fleet_id_fkey")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("comfyui_workers_pkey")),
        sa.UniqueConstraint("key_hash", name=op.f("comfyui_workers_key_hash_unique")),
        sa.UniqueConstraint("worker_id", name=op.f("comfyui_workers_worker_id_unique")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("comfyui_workers_fleet_id_index"), "comfyui_workers", ["fleet_id"], unique=False
    )
    op.create_index(
        op.f("comfyui_workers_last_seen_at_index"),
        "comfyui_workers",
        ["last_seen_at"],
        unique=False,
    )


def _comfyui_workflow_fleets() -> None:
    op.create_table(
        "comfyui_workflow_fleets",
        sa.Column("workflow_id", sa.BigInteger(), nullable=False),
        sa.Column("fleet_id", sa.BigInteger(), nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.ForeignKeyConstraint(
            ["fleet_id"], ["comfyui_fleets.id"], name=op.f("comfyui_workflow_fleets_fleet_id_fkey")
        ),
        sa.ForeignKeyConstraint(
            ["workflow_id"], ["workflows.id"], name=op.f("comfyui_workflow_fleets_workflow_id_fkey")
        ),
        sa.PrimaryKeyConstraint(
            "workflow_id", "fleet_id", name=op.f("comfyui_workflow_fleets_pkey")
        ),
    )


def _worker_workflows() -> None:
    op.create_table(
        "worker_workflows",
        sa.Column("worker_row_id", sa.BigInteger(), nullable=False),
        sa.Column("workflow_id", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["worker_row_id"],
            ["comfyui_workers.id"],
            name=op.f("worker_workflows_worker_row_id_fkey"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["workflow_id"], ["workflows.id"], name=op.f("worker_workflows_workflow_id_fkey")
        ),
        sa.PrimaryKeyConstraint("worker_row_id", "workflow_id", name=op.f("worker_workflows_pkey")),
    )


TABLES = (
    _audit_log,
    _control_state,
    _tenants,
    _worker_readings,
    _workflows,
    _ai_job_dispatches,
    _comfyui_fleets,
    _workflow_versions,
    _comfyui_workers,
    _comfyui_workflow_fleets,
    _worker_workflows,
)
