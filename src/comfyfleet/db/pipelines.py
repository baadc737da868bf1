"""Tables of pipelines, in the tenant pools. Each row says whose it is."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)

from comfyfleet.db.belonging import tenant
from comfyfleet.db.types import Document, Json, Moment, RowId

pipelines = Table(
    "pipelines",
    tenant,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),
    Column("name", String(200), nullable=False),
    Column("document", Document, nullable=False),  # as it was given; never changed
    Column("created_at", Moment, nullable=False),
    Column("deleted_at", Moment),  # its runs stay
    Index(None, "tenant_id", "user_id", "created_at", "id"),
)

pipeline_runs = Table(
    "pipeline_runs",
    tenant,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),  # who started it, and pays
    Column("pipeline_id", Uuid, ForeignKey("pipelines.id"), nullable=False),
    Column("target_folder", String(200), nullable=False),
    Column("variables", Json, nullable=False),
    Column("base_candidates", Integer, nullable=False),
    Column("status", String(20), nullable=False),
    Column("pause_reason", String(50)),
    Column("reason", String(50)),  # why nothing was submitted at the last look
    Column("trouble", Text),  # what stood in the way of the last submit
    Column("candidates_max", Integer),
    Column("tokens_max", BigInteger),
    Column("bytes_max", BigInteger),
    Column("concurrent_jobs", Integer, nullable=False),
    Column("until", Moment),
    Column("idempotency_key", String(200)),
    Column("request_hash", String(64), nullable=False),
    Column("look_at", Moment),  # when it is next asked what to make; none: when something happens
    Column("served_at", Moment),  # its last submit: runs take turns
    Column("alerted_at", Moment),
    Column("created_at", Moment, nullable=False),
    Column("changed_at", Moment, nullable=False),  # the last time that anything happened in it
    Column("files_removed_at", Moment),
    UniqueConstraint("tenant_id", "idempotency_key"),
    CheckConstraint("status IN ('active', 'paused', 'cancelled')", name="status"),
    Index(None, "tenant_id", "user_id", "created_at", "id"),
    Index(None, "look_at"),
    Index(None, "changed_at"),
)

pipeline_jobs = Table(
    "pipeline_jobs",
    tenant,
    Column("id", Uuid, primary_key=True),  # the job's own
    Column("tenant_id", Uuid, nullable=False),
    Column("run_id", Uuid, ForeignKey("pipeline_runs.id"), nullable=False),
    Column("step", Integer, nullable=False),
    Column("parent_id", Uuid),
    Column("number", Integer, nullable=False),  # of those with this step and parent
    Column("seed", String(20)),  # a number up to 2**64, which no integer column holds
    Column("status", String(20), nullable=False),
    Column("tokens", BigInteger, nullable=False),  # reserved or consumed; 0 once refunded
    Column("timeout_seconds", Integer, nullable=False),
    Column("error", Text),
    Column("created_at", Moment, nullable=False),
    Column("ended_at", Moment),
    CheckConstraint(
        "status IN ('in_flight', 'done', 'failed', 'retried', 'cancelled')", name="status"
    ),
    Index(None, "run_id", "step", "parent_id"),
    Index(None, "run_id", "ended_at"),
)
_IN_FLIGHT = "status = 'in_flight'"
Index(
    "pipeline_jobs_in_flight",
    pipeline_jobs.c.run_id,
    postgresql_where=text(_IN_FLIGHT),
    sqlite_where=text(_IN_FLIGHT),
)

pipeline_candidates = Table(
    "pipeline_candidates",
    tenant,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("run_id", Uuid, ForeignKey("pipeline_runs.id"), nullable=False),
    Column("step", Integer, nullable=False),
    Column("parent_id", Uuid),
    Column("job_id", Uuid, nullable=False),
    Column("output_index", Integer, nullable=False),
    Column("file_id", Uuid),  # none once retention has removed it
    Column("path", Text, nullable=False),  # in listings and exports
    Column("mime_type", String(200), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("seed", String(20)),
    Column("properties", Json, nullable=False),
    Column("score", Double, nullable=False),
    Column("status", String(20), nullable=False),
    Column("child_count", Integer, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("text", Text),  # what its job showed, beside the file or in its place
    UniqueConstraint("job_id", "output_index"),
    UniqueConstraint("run_id", "path"),
    CheckConstraint("status IN ('active', 'approved', 'rejected', 'winner')", name="status"),
    Index(None, "run_id", "created_at", "id"),
    Index(None, "run_id", "parent_id"),
)

pipeline_judgements = Table(
    "pipeline_judgements",
    tenant,
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

pipeline_votes = Table(
    "pipeline_votes",
    tenant,
    Column("number", RowId, primary_key=True),  # the order in which they count
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

pipeline_events = Table(
    "pipeline_events",
    tenant,
    Column("id", RowId, primary_key=True),  # what a reader goes on from
    Column("tenant_id", Uuid, nullable=False),
    Column("run_id", Uuid, nullable=False),
    Column("kind", String(50), nullable=False),
    Column("actor", String(100), nullable=False),
    Column("data", Json, nullable=False),
    Column("is_audited", Boolean, nullable=False),  # told to the central audit log
    Column("created_at", Moment, nullable=False),
    Index(None, "run_id", "id"),
    sqlite_autoincrement=True,
)
_UNTOLD = "NOT is_audited"
Index(
    "pipeline_events_untold",
    pipeline_events.c.id,
    postgresql_where=text(_UNTOLD),
    sqlite_where=text(_UNTOLD),
)
