"""Creates the first schema of a tenant pool."""

from alembic import op
from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
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
from sqlalchemy.schema import CreateIndex, CreateTable

from comfyfleet.server.db.central_tables import NAMING_CONVENTION
from comfyfleet.server.db.dialect import Document, Json, Moment, RowId, partial_index

revision = "schema_1"
down_revision = None
branch_labels = None
depends_on = None

# The tables in the state of this revision. The current tables in the code have changed since then.
schema = MetaData(naming_convention=NAMING_CONVENTION)

Table(
    "pipelines",
    schema,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),
    Column("name", String(200), nullable=False),
    Column("document", Document, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("deleted_at", Moment),
    Index(None, "tenant_id", "user_id", "created_at", "id"),
)

Table(
    "pipeline_runs",
    schema,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),
    Column("pipeline_id", Uuid, ForeignKey("pipelines.id"), nullable=False),
    Column("target_folder", String(200), nullable=False),
    Column("variables", Json, nullable=False),
    Column("base_candidates", Integer, nullable=False),
    Column("status", String(20), nullable=False),
    Column("pause_reason", String(50)),
    Column("reason", String(50)),
    Column("trouble", Text),
    Column("candidates_max", Integer),
    Column("tokens_max", BigInteger),
    Column("bytes_max", BigInteger),
    Column("concurrent_jobs", Integer, nullable=False),
    Column("until", Moment),
    Column("idempotency_key", String(200)),
    Column("request_hash", String(64), nullable=False),
    Column("look_at", Moment),
    Column("served_at", Moment),
    Column("alerted_at", Moment),
    Column("created_at", Moment, nullable=False),
    Column("changed_at", Moment, nullable=False),
    Column("files_removed_at", Moment),
    UniqueConstraint("tenant_id", "idempotency_key"),
    CheckConstraint("status IN ('active', 'paused', 'cancelled')", name="status"),
    Index(None, "tenant_id", "user_id", "created_at", "id"),
    Index(None, "look_at"),
    Index(None, "changed_at"),
)

Table(
    "pipeline_jobs",
    schema,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("run_id", Uuid, ForeignKey("pipeline_runs.id"), nullable=False),
    Column("step", Integer, nullable=False),
    Column("parent_id", Uuid),
    Column("number", Integer, nullable=False),
    Column("seed", String(20)),
    Column("status", String(20), nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("timeout_seconds", Integer, nullable=False),
    Column("error", Text),
    Column("created_at", Moment, nullable=False),
    Column("ended_at", Moment),
    CheckConstraint(
        "status IN ('in_flight', 'done', 'failed', 'retried', 'cancelled')", name="status"
    ),
    Index(None, "run_id", "step", "parent_id"),
    Index(None, "run_id", "ended_at"),
    partial_index("pipeline_jobs_in_flight", "run_id", where="status = 'in_flight'"),
)

Table(
    "pipeline_candidates",
    schema,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("run_id", Uuid, ForeignKey("pipeline_runs.id"), nullable=False),
    Column("step", Integer, nullable=False),
    Column("parent_id", Uuid),
    Column("job_id", Uuid, nullable=False),
    Column("output_index", Integer, nullable=False),
    Column("file_id", Uuid),
    Column("path", Text, nullable=False),
    Column("mime_type", String(200), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("seed", String(20)),
    Column("properties", Json, nullable=False),
    Column("score", Double, nullable=False),
    Column("status", String(20), nullable=False),
    Column("child_count", Integer, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("text", Text),
    UniqueConstraint("job_id", "output_index"),
    UniqueConstraint("run_id", "path"),
    CheckConstraint("status IN ('active', 'approved', 'rejected', 'winner')", name="status"),
    Index(None, "run_id", "created_at", "id"),
    Index(None, "run_id", "parent_id"),
)

Table(
    "pipeline_judgements",
    schema,
    Column("id", RowId, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("run_id", Uuid, ForeignKey("pipeline_runs.id"), nullable=False),
    Column("candidate_id", Uuid, nullable=False),
    Column("before", String(20), nullable=False),
    Column("after", String(20), nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("undone_at", Moment),
    Index(None, "candidate_id", "id"),
    sqlite_autoincrement=True,
)

Table(
    "pipeline_votes",
    schema,
    Column("number", RowId, primary_key=True),
    Column("id", Uuid, nullable=False),
    Column("tenant_id", Uuid, nullable=False),
    Column("run_id", Uuid, ForeignKey("pipeline_runs.id"), nullable=False),
    Column("winner_id", Uuid, nullable=False),
    Column("loser_id", Uuid, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("undone_at", Moment),
    UniqueConstraint("id"),
    Index(None, "run_id", "number"),
    sqlite_autoincrement=True,
)

Table(
    "pipeline_events",
    schema,
    Column("id", RowId, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("run_id", Uuid, nullable=False),
    Column("kind", String(50), nullable=False),
    Column("actor", String(100), nullable=False),
    Column("data", Json, nullable=False),
    Column("is_audited", Boolean, nullable=False),
    Column("created_at", Moment, nullable=False),
    Index(None, "run_id", "id"),
    partial_index("pipeline_events_untold", "id", where="NOT is_audited"),
    sqlite_autoincrement=True,
)

IS_ACTIVE = "status IN ('queued', 'processing')"
IS_HELD = "is_held AND status = 'queued'"
IS_RARE = "status IN ('failed', 'cancelled')"
IS_ENDED = "completed_at IS NOT NULL"
HAS_OLD_PROMPT = "completed_at IS NOT NULL AND prompt_removed_at IS NULL"
Table(
    "ai_jobs",
    schema,
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
    Column("prompt", Document, nullable=False),
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
    Column("video_id", Uuid),
    Column("batch_id", Uuid),
    Column("batch_position", Integer),
    Column("run_kind", String(20)),
    Column("run_id", Uuid),
    Column("is_held", Boolean, nullable=False, server_default=text("false")),
    CheckConstraint(
        "status IN ('queued', 'processing', 'completed', 'failed', 'cancelled')", name="status"
    ),
    Column("prompt_removed_at", Moment),
    Index(None, "submitted_at", "id"),
    Index(None, "tenant_id", "submitted_at", "id"),
    Index("ai_jobs_of_user", "tenant_id", "user_id", "submitted_at", "id"),
    Index("ai_jobs_of_user_by_status", "tenant_id", "user_id", "status", "submitted_at", "id"),
    Index(None, "batch_id", "batch_position"),
    Index(None, "run_id"),
    Index("ai_jobs_key", "tenant_id", "user_id", "idempotency_key", unique=True),
    partial_index(
        "ai_jobs_key_of_nobody",
        "tenant_id",
        "idempotency_key",
        where="user_id IS NULL",
        unique=True,
    ),
    partial_index(
        "ai_jobs_of_media", "tenant_id", "video_id", "submitted_at", where="video_id IS NOT NULL"
    ),
    partial_index("ai_jobs_active", "tenant_id", "id", where=IS_ACTIVE),
    partial_index("ai_jobs_active_of_user", "tenant_id", "user_id", where=IS_ACTIVE),
    partial_index("ai_jobs_held", "tenant_id", "user_id", "submitted_at", "id", where=IS_HELD),
    partial_index("ai_jobs_rare", "status", "submitted_at", "id", where=IS_RARE),
    partial_index(
        "ai_jobs_ended_of_workflow", "workflow_slug", "submitted_at", "id", where=IS_ENDED
    ),
    partial_index(
        "ai_jobs_rare_of_workflow", "workflow_slug", "status", "submitted_at", "id", where=IS_RARE
    ),
    partial_index("ai_jobs_old_prompts", "completed_at", where=HAS_OLD_PROMPT),
)

Table(
    "job_attempts",
    schema,
    Column("job_id", Uuid, ForeignKey("ai_jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("lease_number", Integer, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("worker_id", String(200), nullable=False),
    Column("started_at", Moment, nullable=False),
    Column("filled_in", Document),
)

Table(
    "files",
    schema,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid),
    Column("disk", String(20), nullable=False),
    Column("path", Text, nullable=False),
    Column("filename", String(300), nullable=False),
    Column("mime_type", String(200), nullable=False),
    Column("size", BigInteger),
    Column("content_hash", String(64)),
    Column("metadata", Json, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("checked_at", Moment),
    Index(None, "tenant_id", "content_hash"),
    Index(None, "tenant_id", "created_at"),
    Index(None, "path"),
    partial_index("files_unchecked", "created_at", where="checked_at IS NULL"),
    partial_index("files_unchecked_of_tenant", "tenant_id", where="checked_at IS NULL"),
)

Table(
    "storage_use",
    schema,
    Column("tenant_id", Uuid, primary_key=True),
    Column("bytes", BigInteger, nullable=False),
)

Table(
    "outbox",
    schema,
    Column("id", RowId, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("job_id", Uuid, nullable=False),
    Column("kind", String(50), nullable=False),
    Column("payload", Json, nullable=False),
    Column("tries", Integer, nullable=False, server_default="0"),
    Column("not_before", Moment, nullable=False),
    Column("created_at", Moment, nullable=False),
    Index(None, "not_before", "id"),
    sqlite_autoincrement=True,
)

Table(
    "users",
    schema,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("email", String(320)),
    Column("name", String(200)),
    Column("is_active", Boolean, nullable=False),
    Column("created_at", Moment, nullable=False),
    UniqueConstraint("tenant_id", "email"),
    Index(None, "tenant_id", "created_at", "id"),
)

Table(
    "videos",
    schema,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),
    Column("kind", String(20), nullable=False),
    Column("original_file_id", Uuid),
    Column("processed_file_id", Uuid),
    Column("job_id", Uuid),
    Column("active_job_id", Uuid),
    Column("processing_details", Json, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("expired_at", Moment),
    CheckConstraint("kind IN ('image', 'video', 'audio')", name="kind"),
    Index(None, "tenant_id", "user_id", "created_at", "id"),
    Index(None, "job_id"),
    partial_index(
        "videos_original_file_id", "original_file_id", where="original_file_id IS NOT NULL"
    ),
    partial_index(
        "videos_processed_file_id", "processed_file_id", where="processed_file_id IS NOT NULL"
    ),
    partial_index("videos_age", "tenant_id", "created_at", where="expired_at IS NULL"),
)

Table(
    "job_events",
    schema,
    Column("id", RowId, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("job_id", Uuid, nullable=False),
    Column("kind", String(20), nullable=False),
    Column("data", Json, nullable=False),
    Column("created_at", Moment, nullable=False),
    Index(None, "tenant_id", "job_id", "id"),
    Index(None, "created_at"),
    sqlite_autoincrement=True,
)

Table(
    "batches",
    schema,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),
    Column("effect_id", Uuid, nullable=False),
    Column("total", Integer, nullable=False),
    Column("idempotency_key", String(200)),
    Column("request_hash", String(64), nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("cancelled_at", Moment),
    UniqueConstraint("tenant_id", "user_id", "idempotency_key"),
    Index(None, "tenant_id", "user_id", "created_at", "id"),
)

Table(
    "webhooks",
    schema,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),
    Column("url", Text, nullable=False),
    Column("secret", String(100), nullable=False),
    Column("events", Json, nullable=False),
    Column("is_active", Boolean, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("on_again_at", Moment),
    Index(None, "tenant_id", "user_id"),
)

Table(
    "webhook_deliveries",
    schema,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("webhook_id", Uuid, ForeignKey("webhooks.id", ondelete="CASCADE"), nullable=False),
    Column("job_id", Uuid, nullable=False),
    Column("event", String(50), nullable=False),
    Column("payload", Json, nullable=False),
    Column("status", String(20), nullable=False),
    Column("tries", Integer, nullable=False),
    Column("not_before", Moment, nullable=False),
    Column("last_status", Integer),
    Column("last_error", Text),
    Column("created_at", Moment, nullable=False),
    Column("ended_at", Moment),
    UniqueConstraint("webhook_id", "job_id", "event"),
    CheckConstraint("status IN ('pending', 'delivered', 'failed')", name="status"),
    Index(None, "webhook_id", "created_at", "id"),
    partial_index("webhook_deliveries_due", "not_before", where="status = 'pending'"),
)

Table(
    "graphs",
    schema,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),
    Column("name", String(200), nullable=False),
    Column("version", Integer, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("deleted_at", Moment),
    Index(None, "tenant_id", "created_at", "id"),
)

Table(
    "graph_versions",
    schema,
    Column("graph_id", Uuid, ForeignKey("graphs.id", ondelete="CASCADE"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("document", Document, nullable=False),
    Column("created_at", Moment, nullable=False),
)

Table(
    "graph_runs",
    schema,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),
    Column("graph_id", Uuid, nullable=False),
    Column("graph_version", Integer, nullable=False),
    Column("snapshot", Document, nullable=False),
    Column("inputs", Document, nullable=False),
    Column("max_tokens", BigInteger),
    Column("status", String(20), nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("error", Document),
    Column("outputs", Document),
    Column("created_at", Moment, nullable=False),
    Column("changed_at", Moment, nullable=False),
    Column("ended_at", Moment),
    CheckConstraint(
        "status IN ('pending', 'running', 'waiting_for_user', 'completed', 'failed', 'cancelled')",
        name="status",
    ),
    Index(None, "tenant_id", "user_id", "created_at", "id"),
    partial_index(
        "graph_runs_going_on",
        "id",
        where="status IN ('pending', 'running', 'waiting_for_user')",
    ),
)

Table(
    "graph_executions",
    schema,
    Column("run_id", Uuid, ForeignKey("graph_runs.id", ondelete="CASCADE"), primary_key=True),
    Column("node", String(64), primary_key=True),
    Column("at", String(64), primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("record", Document, nullable=False),
)

Table(
    "token_wallets",
    schema,
    Column("tenant_id", Uuid, primary_key=True),
    Column("user_id", Uuid, primary_key=True),
    Column("balance", BigInteger, nullable=False),
    Column("created_at", Moment, nullable=False),
    CheckConstraint("balance >= 0", name="balance"),
)

Table(
    "token_transactions",
    schema,
    Column("id", RowId, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),
    Column("job_id", Uuid),
    Column("type", String(20), nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("provider_transaction_id", String(200)),
    Column("created_at", Moment, nullable=False),
    UniqueConstraint("tenant_id", "job_id", "type"),
    UniqueConstraint("tenant_id", "provider_transaction_id"),
    CheckConstraint(
        "(type = 'PAYMENT_CREDIT' AND amount > 0 AND provider_transaction_id IS NOT NULL)"
        " OR (type = 'JOB_RESERVE' AND amount < 0 AND job_id IS NOT NULL)"
        " OR (type = 'JOB_CONSUME' AND amount = 0 AND job_id IS NOT NULL)"
        " OR (type = 'JOB_REFUND' AND amount > 0 AND job_id IS NOT NULL)",
        name="amount",
    ),
    Index(None, "tenant_id", "user_id", "id"),
    partial_index(
        "token_transactions_settled",
        "tenant_id",
        "job_id",
        where="type IN ('JOB_CONSUME', 'JOB_REFUND')",
        unique=True,
    ),
)


def upgrade() -> None:
    for table in schema.sorted_tables:
        op.execute(CreateTable(table))
        for index in sorted(table.indexes, key=lambda each: str(each.name)):
            op.execute(CreateIndex(index))
    _refuse_changes("token_transactions")


def downgrade() -> None:
    schema.drop_all(op.get_bind(), checkfirst=False)
    if op.get_bind().dialect.name != "sqlite":
        op.execute("DROP FUNCTION token_transactions_kept()")


def _refuse_changes(name: str) -> None:
    """Adds database triggers that prevent changes and deletions of rows."""
    says = f"rows of {name} are never changed"
    if op.get_bind().dialect.name == "sqlite":
        for act in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {name}_no_{act.lower()} BEFORE {act} ON {name} "
                f"BEGIN SELECT RAISE(ABORT, '{says}'); END"
            )
        return
    op.execute(
        f"CREATE FUNCTION {name}_kept() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{says}'; END $$"
    )
    op.execute(
        f"CREATE TRIGGER {name}_kept BEFORE UPDATE OR DELETE OR TRUNCATE ON {name} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {name}_kept()"
    )
