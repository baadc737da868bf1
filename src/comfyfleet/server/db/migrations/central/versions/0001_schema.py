"""Creates the first schema of the central database."""

from typing import Any

from alembic import op
from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    desc,
    text,
)
from sqlalchemy.schema import CreateIndex, CreateTable

from comfyfleet.server.db.central_tables import NAMING_CONVENTION
from comfyfleet.server.db.dialect import Json, Moment, RowId, partial_index

revision = "schema_1"
down_revision = None
branch_labels = None
depends_on = None

# The tables in the state of this revision. The current tables in the code have changed since then.
schema = MetaData(naming_convention=NAMING_CONVENTION)

Table(
    "tenants",
    schema,
    Column("id", Uuid, primary_key=True),
    Column("name", String(200), nullable=False),
    Column("pool", String(100), nullable=False),
    Column("min_priority", Integer, nullable=False, server_default="-10"),
    Column("max_priority", Integer, nullable=False, server_default="10"),
    Column("max_queued", Integer),
    Column("created_at", Moment, nullable=False),
    Column("retention_days", Integer),
    Column("max_storage_bytes", BigInteger),
    Column("erasing_at", Moment),
    Column("erased_at", Moment),
)

Table(
    "workflows",
    schema,
    Column("id", RowId, primary_key=True),
    Column("slug", String(100), nullable=False, unique=True),
    Column("version", Integer, nullable=False),
    Column("required_capabilities", Json, nullable=False),
    Column("price_tokens", Integer, nullable=False, server_default="0"),
    Column("run_limit_seconds", Integer, nullable=False, server_default="3600"),
    Column("is_active", Boolean, nullable=False),
    Column("is_paused", Boolean, nullable=False, server_default=text("false")),
    Column("is_open", Boolean, nullable=False, server_default=text("false")),
    Column("created_at", Moment, nullable=False),
    Column("is_offered", Boolean, nullable=False, server_default=text("false")),
)

Table(
    "workflow_versions",
    schema,
    Column("workflow_id", BigInteger, ForeignKey("workflows.id"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("kind", String(20), nullable=False),
    Column("document_key", Text, nullable=False),
    Column("document_hash", String(64), nullable=False),
    Column("properties", Json, nullable=False),
    Column("output_node_id", String(200)),
    Column("node_types", Json, nullable=False),
    Column("models", Json, nullable=False),
    Column("created_at", Moment, nullable=False),
)

Table(
    "comfyui_fleets",
    schema,
    Column("id", RowId, primary_key=True),
    Column("slug", String(100), nullable=False),
    Column("stage", String(50), nullable=False),
    Column("secret_hash", String(64), nullable=False),
    Column("max_workers", Integer),
    Column("open_workflow_id", BigInteger, ForeignKey("workflows.id")),
    Column("object_info_key", Text),
    Column("object_info_hash", String(64)),
    Column("created_at", Moment, nullable=False),
    Column("approval", String(10), nullable=False, server_default="auto"),
    UniqueConstraint("slug", "stage"),
)

Table(
    "comfyui_workflow_fleets",
    schema,
    Column("workflow_id", BigInteger, ForeignKey("workflows.id"), primary_key=True),
    Column("fleet_id", BigInteger, ForeignKey("comfyui_fleets.id"), primary_key=True),
    Column("created_at", Moment, nullable=False),
)

Table(
    "comfyui_workers",
    schema,
    Column("id", RowId, primary_key=True),
    Column("worker_id", String(200), nullable=False, unique=True),
    Column("key_hash", String(64), nullable=False, unique=True),
    Column("fleet_id", BigInteger, ForeignKey("comfyui_fleets.id"), nullable=False),
    Column("registration_source", String(20), nullable=False),
    Column("protocol_version", Integer, nullable=False),
    Column("capabilities", Json, nullable=False),
    Column("providers", Json, nullable=False),
    Column("max_concurrency", Integer, nullable=False),
    Column("current_load", Integer, nullable=False, server_default="0"),
    Column("is_approved", Boolean, nullable=False),
    Column("is_draining", Boolean, nullable=False, server_default=text("false")),
    Column("facts", Json),
    Column("facts_hash", String(64)),
    Column("refusals", Json),
    Column("models_loaded", Json, nullable=False),
    Column("last_seen_at", Moment, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("revoked_at", Moment),
    Column("next_key", String(100)),
    Column("next_key_hash", String(64)),
    Index(None, "next_key_hash", unique=True),
    Index(None, "fleet_id"),
    Index(None, "last_seen_at"),
    sqlite_autoincrement=True,
)

Table(
    "worker_workflows",
    schema,
    Column(
        "worker_row_id",
        BigInteger,
        ForeignKey("comfyui_workers.id", ondelete="CASCADE"),
        primary_key=True,
    ),
    Column("workflow_id", BigInteger, ForeignKey("workflows.id"), primary_key=True),
)

Table(
    "worker_readings",
    schema,
    Column("id", RowId, primary_key=True),
    Column("worker_id", String(200), nullable=False),
    Column("at", Moment, nullable=False),
    Column("reading", Json, nullable=False),
    Index(None, "worker_id", "at"),
    Index(None, "at"),
)

QUEUED = "status = 'queued'"
FREE = f"{QUEUED} AND not_before IS NULL AND backend_affinity IS NULL"
BOUND = f"{QUEUED} AND not_before IS NULL AND backend_affinity IS NOT NULL"
LEASED = "status = 'leased'"
PREFETCHED = f"{LEASED} AND is_prefetched AND NOT recall_requested AND started_at IS NULL"
IS_ENDED = "ended_at IS NOT NULL"
IS_RARE = "status IN ('failed', 'cancelled')"
_lane: tuple[Any, ...] = ("workflow_id", "stage", "provider", desc("priority"), "rank", "id")
_share = ("tenant_id", "workflow_id", "stage", "provider", "priority", "rank")
Table(
    "ai_job_dispatches",
    schema,
    Column("id", RowId, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("tenant_job_id", Uuid, nullable=False),
    Column("workflow_id", BigInteger, ForeignKey("workflows.id"), nullable=False),
    Column("stage", String(50), nullable=False, server_default="production"),
    Column("provider", String(20), nullable=False),
    Column("status", String(20), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("rank", BigInteger, nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("max_attempts", Integer, nullable=False, server_default="3"),
    Column("requeues", Integer, nullable=False, server_default="0"),
    Column("lease_number", Integer, nullable=False, server_default="0"),
    Column("lease_token", Uuid),
    Column("lease_expires_at", Moment),
    Column("worker_id", String(200)),
    Column("not_before", Moment),
    Column("avoid_worker_id", String(200)),
    Column("avoid_until", Moment),
    Column("model_key", String(300)),
    Column("model_set", String(64)),
    Column("backend_affinity", String(300)),
    Column("is_poisoned", Boolean, nullable=False, server_default=text("false")),
    Column("cancel_requested", Boolean, nullable=False, server_default=text("false")),
    Column("recall_requested", Boolean, nullable=False, server_default=text("false")),
    Column("is_prefetched", Boolean, nullable=False, server_default=text("false")),
    Column("duration_seconds", Float),
    Column("last_error", Text),
    Column("created_at", Moment, nullable=False),
    Column("queued_at", Moment, nullable=False),
    Column("leased_at", Moment),
    Column("started_at", Moment),
    Column("heard_at", Moment),
    Column("ended_at", Moment),
    Column("lost_leases", Integer, nullable=False, server_default="0"),
    UniqueConstraint("tenant_id", "tenant_job_id"),
    CheckConstraint("attempts <= max_attempts", name="attempts"),
    CheckConstraint("provider IN ('self_hosted', 'cloud')", name="provider"),
    CheckConstraint(
        "status IN ('queued', 'leased', 'completed', 'failed', 'cancelled')", name="status"
    ),
    partial_index("ai_job_dispatches_lane", *_lane, where=FREE),
    partial_index("ai_job_dispatches_bound", "backend_affinity", *_lane, where=BOUND),
    partial_index(
        "ai_job_dispatches_due", "not_before", where=f"{QUEUED} AND not_before IS NOT NULL"
    ),
    partial_index("ai_job_dispatches_expiry", "lease_expires_at", where=LEASED),
    partial_index("ai_job_dispatches_held", "worker_id", where=LEASED),
    partial_index("ai_job_dispatches_prefetched", "leased_at", where=PREFETCHED),
    partial_index("ai_job_dispatches_share", *_share, where=QUEUED),
    partial_index("ai_job_dispatches_ended", "ended_at", where=IS_ENDED),
    partial_index("ai_job_dispatches_ended_of_tenant", "tenant_id", "id", where=IS_ENDED),
    partial_index("ai_job_dispatches_ended_of_worker", "worker_id", "id", where=IS_ENDED),
    partial_index("ai_job_dispatches_ended_of_workflow", "workflow_id", "id", where=IS_ENDED),
    partial_index("ai_job_dispatches_rare", "status", "id", where=IS_RARE),
    partial_index("ai_job_dispatches_poisoned", "id", where="is_poisoned"),
    postgresql_with={
        "fillfactor": "80",
        "autovacuum_vacuum_scale_factor": "0.01",
        "autovacuum_vacuum_cost_delay": "0",
    },
)

Table(
    "model_switches",
    schema,
    Column("fleet_id", BigInteger, ForeignKey("comfyui_fleets.id"), primary_key=True),
    Column("model_key", String(300), primary_key=True),
    Column("workflow_id", BigInteger, ForeignKey("workflows.id"), primary_key=True),
    Column("stayed", Json, nullable=False),
    Column("switched", Json, nullable=False),
    Column("updated_at", Moment, nullable=False),
    Index(None, "updated_at"),
)

Table(
    "audit_log",
    schema,
    Column("id", RowId, primary_key=True),
    Column("at", Moment, nullable=False),
    Column("actor", String(200), nullable=False),
    Column("action", String(50), nullable=False),
    Column("subject", String(300), nullable=False),
    Column("tenant_id", Uuid),
    Column("details", Json, nullable=False),
    Index(None, "subject", "id"),
    Index(None, "action", "id"),
    Index(None, "actor", "id"),
    Index(None, "tenant_id", "id"),
    Index("audit_log_at", "at", postgresql_using="brin"),
)

Table(
    "operators",
    schema,
    Column("id", Uuid, primary_key=True),
    Column("name", String(100), nullable=False, unique=True),
    Column("role", String(20), nullable=False),
    Column("key_hash", String(64), nullable=False, unique=True),
    Column("prefix", String(20), nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("created_by", String(200), nullable=False),
    Column("revoked_at", Moment),
    Column("last_used_at", Moment),
    CheckConstraint("role IN ('viewer', 'operator', 'owner')", name="role"),
)

Table(
    "control_state",
    schema,
    Column("name", String(100), primary_key=True),
    Column("value", Json, nullable=False),
)

Table(
    "api_keys",
    schema,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), nullable=False),
    Column("user_id", Uuid, nullable=False),
    Column("name", String(200), nullable=False),
    Column("key_hash", String(64), nullable=False, unique=True),
    Column("prefix", String(20), nullable=False),
    Column("scopes", Json, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("expires_at", Moment),
    Column("revoked_at", Moment),
    Column("last_used_at", Moment),
    Index(None, "tenant_id", "user_id"),
)

Table(
    "effects",
    schema,
    Column("id", Uuid, primary_key=True),
    Column("slug", String(100), nullable=False, unique=True),
    Column("workflow_id", BigInteger, ForeignKey("workflows.id"), nullable=False),
    Column("title", String(200), nullable=False),
    Column("description", Text, nullable=False),
    Column("preview_url", Text),
    Column("price_tokens", Integer, nullable=False),
    Column("overrides", Json, nullable=False),
    Column("stage", String(50), nullable=False),
    Column("provider", String(20), nullable=False),
    Column("is_published", Boolean, nullable=False),
    Column("max_upload_bytes", BigInteger),
    Column("media_types", Json, nullable=False),
    Column("last_processing_time_seconds", Float),
    Column("typical_seconds", Float),
    Column("created_at", Moment, nullable=False),
    Column("locked", Json, nullable=False, server_default="[]"),
    Column("keep_metadata", Boolean, nullable=False, server_default=text("false")),
    CheckConstraint("price_tokens >= 0", name="price_tokens"),
    CheckConstraint("provider IN ('self_hosted', 'cloud')", name="provider"),
    Index(None, "workflow_id"),
)


def upgrade() -> None:
    for table in schema.sorted_tables:
        op.execute(CreateTable(table))
        for index in sorted(table.indexes, key=lambda each: str(each.name)):
            op.execute(CreateIndex(index))


def downgrade() -> None:
    schema.drop_all(op.get_bind(), checkfirst=False)
