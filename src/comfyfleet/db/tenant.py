"""Tables of a tenant pool. Each row says whose it is."""

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)

from comfyfleet.db.central import NAMES
from comfyfleet.db.types import Document, Json, Moment, RowId

tenant = MetaData(naming_convention=NAMES)

ai_jobs = Table(
    "ai_jobs",
    tenant,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid),
    Column("effect_id", Uuid),
    Column("workflow_id", BigInteger, nullable=False),
    Column("workflow_slug", String(100), nullable=False),
    Column("workflow_version", Integer, nullable=False),
    Column("stage", String(50), nullable=False),
    Column("provider", String(20), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("backend_affinity", String(300)),
    Column("model_key", String(300)),
    Column("model_set", String(64)),
    Column("status", String(20), nullable=False),
    Column("prompt", Document, nullable=False),  # as sent, but for the names of assets
    Column("properties", Json, nullable=False),
    Column("assets", Json, nullable=False),
    Column("output_node_id", String(200)),
    Column("input_file_id", Uuid),
    Column("output_file_id", Uuid),
    Column("provider_job_id", String(200)),
    Column("result_metadata", Json),
    Column("error_message", Text),
    Column("raw_error", Text),
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("lease_number", Integer, nullable=False, server_default="0"),
    Column("lease_token", Uuid),
    Column("reserved_tokens", BigInteger, nullable=False, server_default="0"),
    Column("retry_of", Uuid),
    Column("idempotency_key", String(200)),
    Column("request_hash", String(64)),
    Column("submitted_at", Moment, nullable=False),
    Column("started_at", Moment),
    Column("completed_at", Moment),
    UniqueConstraint("tenant_id", "idempotency_key"),
    CheckConstraint(
        "status IN ('queued', 'processing', 'completed', 'failed', 'cancelled')", name="status"
    ),
    Index(None, "tenant_id", "submitted_at", "id"),
)
_ACTIVE = "status IN ('queued', 'processing')"
Index(
    "ai_jobs_active",
    ai_jobs.c.tenant_id,
    ai_jobs.c.id,
    postgresql_where=text(_ACTIVE),
    sqlite_where=text(_ACTIVE),
)

files = Table(
    "files",
    tenant,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid),
    Column("disk", String(20), nullable=False),  # local or s3
    Column("path", Text, nullable=False),  # the key in object storage
    Column("filename", String(300), nullable=False),
    Column("mime_type", String(200), nullable=False),
    Column("size", BigInteger),  # none while it is only announced
    Column("content_hash", String(64)),
    Column("metadata", Json, nullable=False),
    Column("created_at", Moment, nullable=False),
    Index(None, "tenant_id", "content_hash"),
)

outbox = Table(
    "outbox",
    tenant,
    Column("id", RowId, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("job_id", Uuid, nullable=False),
    Column("kind", String(50), nullable=False),
    Column("payload", Json, nullable=False),
    Column("tries", Integer, nullable=False, server_default="0"),
    Column("not_before", Moment, nullable=False),
    Column("created_at", Moment, nullable=False),
    Index(None, "not_before", "id"),
)
