"""Tables of a tenant pool: jobs, files, media, graphs, pipelines, wallets and webhooks."""

from typing import Any

from sqlalchemy import (
    DDL,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    event,
    text,
)

from comfyfleet.server.db.central_tables import NAMING_CONVENTION
from comfyfleet.server.db.dialect import Document, Json, Moment, RowId, partial_index

tenant_metadata = MetaData(naming_convention=NAMING_CONVENTION)


pipelines = Table(
    "pipelines",
    tenant_metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),
    Column("name", String(200), nullable=False),
    Column("document", Document, nullable=False),  # as submitted, never changed
    Column("created_at", Moment, nullable=False),
    Column("deleted_at", Moment),  # null unless deleted; the runs are kept
    Index(None, "tenant_id", "user_id", "created_at", "id"),
)

pipeline_runs = Table(
    "pipeline_runs",
    tenant_metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),  # the user who started the run and pays for it
    Column("pipeline_id", Uuid, ForeignKey("pipelines.id"), nullable=False),
    Column("target_folder", String(200), nullable=False),
    Column("variables", Json, nullable=False),
    Column("base_candidates", Integer, nullable=False),
    Column("status", String(20), nullable=False),
    Column("pause_reason", String(50)),
    Column("reason", String(50)),  # why the last check submitted no jobs
    Column("trouble", Text),  # error of the last submission
    Column("trouble_seconds", Integer),  # time until a person must help; null if temporary
    Column("candidates_max", Integer),
    Column("tokens_max", BigInteger),
    Column("bytes_max", BigInteger),
    Column("concurrent_jobs", Integer, nullable=False),
    Column("until", Moment),
    Column("idempotency_key", String(200)),
    Column("request_hash", String(64), nullable=False),
    Column("look_at", Moment),  # time of the next check; null means at the next event
    Column("served_at", Moment),  # time of the last submission, so that runs take turns
    Column("alerted_at", Moment),
    Column("created_at", Moment, nullable=False),
    Column("changed_at", Moment, nullable=False),  # time of the last change in the run
    Column("files_removed_at", Moment),
    UniqueConstraint("tenant_id", "idempotency_key"),
    CheckConstraint("status IN ('active', 'paused', 'cancelled')", name="status"),
    Index(None, "tenant_id", "user_id", "created_at", "id"),
    Index(None, "look_at"),
    Index(None, "changed_at"),
)

pipeline_jobs = Table(
    "pipeline_jobs",
    tenant_metadata,
    Column("id", Uuid, primary_key=True),  # the id of the job
    Column("tenant_id", Uuid, nullable=False),
    Column("run_id", Uuid, ForeignKey("pipeline_runs.id"), nullable=False),
    Column("step", Integer, nullable=False),
    Column("parent_id", Uuid),
    Column("number", Integer, nullable=False),  # position within the step and parent
    Column("seed", String(20)),  # a number up to 2**64, which is too large for an integer column
    Column("status", String(20), nullable=False),
    Column("tokens", BigInteger, nullable=False),  # reserved or consumed; 0 after a refund
    Column("timeout_seconds", Integer, nullable=False),
    Column("error", Text),
    Column("created_at", Moment, nullable=False),
    Column("ended_at", Moment),
    # A judge job scores the candidate parent_id instead of creating its children.
    Column("is_judge", Boolean, nullable=False, server_default=text("false")),
    CheckConstraint(
        "status IN ('in_flight', 'done', 'failed', 'retried', 'cancelled')", name="status"
    ),
    Index(None, "run_id", "step", "parent_id"),
    Index(None, "run_id", "ended_at"),
    partial_index("pipeline_jobs_in_flight", "run_id", where="status = 'in_flight'"),
)

pipeline_candidates = Table(
    "pipeline_candidates",
    tenant_metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("run_id", Uuid, ForeignKey("pipeline_runs.id"), nullable=False),
    Column("step", Integer, nullable=False),
    Column("parent_id", Uuid),
    Column("job_id", Uuid, nullable=False),
    Column("output_index", Integer, nullable=False),
    Column("file_id", Uuid),  # null after the file's retention period
    Column("path", Text, nullable=False),  # path in listings and exports
    Column("mime_type", String(200), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("seed", String(20)),
    Column("properties", Json, nullable=False),
    Column("score", Double, nullable=False),
    Column("status", String(20), nullable=False),
    Column("child_count", Integer, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("text", Text),  # text output of the job, with or without a file
    Column("judged_by", String(20)),  # judge or person; null if not judged
    Column("judge_score", Double),
    Column("judge_error", Text),  # why the judge returned no score
    UniqueConstraint("job_id", "output_index"),
    UniqueConstraint("run_id", "path"),
    CheckConstraint("status IN ('active', 'approved', 'rejected', 'winner')", name="status"),
    Index(None, "run_id", "created_at", "id"),
    Index(None, "run_id", "parent_id"),
)

pipeline_judgements = Table(
    "pipeline_judgements",
    tenant_metadata,
    Column("id", RowId, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("run_id", Uuid, ForeignKey("pipeline_runs.id"), nullable=False),
    Column("candidate_id", Uuid, nullable=False),
    Column("before", String(20), nullable=False),
    Column("after", String(20), nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("undone_at", Moment),
    Column("judged_by", String(20), nullable=False, server_default=text("'person'")),
    Index(None, "candidate_id", "id"),
    sqlite_autoincrement=True,
)

pipeline_votes = Table(
    "pipeline_votes",
    tenant_metadata,
    Column("number", RowId, primary_key=True),  # the order in which the votes were cast
    Column("id", Uuid, nullable=False),
    Column("tenant_id", Uuid, nullable=False),
    Column("run_id", Uuid, ForeignKey("pipeline_runs.id"), nullable=False),
    Column("winner_id", Uuid, nullable=False),
    Column("loser_id", Uuid, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("undone_at", Moment),
    Column("is_tie", Boolean, nullable=False, server_default=text("false")),
    UniqueConstraint("id"),
    Index(None, "run_id", "number"),
    sqlite_autoincrement=True,
)

pipeline_events = Table(
    "pipeline_events",
    tenant_metadata,
    Column("id", RowId, primary_key=True),  # used as the readers' cursor
    Column("tenant_id", Uuid, nullable=False),
    Column("run_id", Uuid, nullable=False),
    Column("kind", String(50), nullable=False),
    Column("actor", String(100), nullable=False),
    Column("data", Json, nullable=False),
    Column("is_audited", Boolean, nullable=False),  # whether the central audit log has a copy
    Column("created_at", Moment, nullable=False),
    Index(None, "run_id", "id"),
    partial_index("pipeline_events_untold", "id", where="NOT is_audited"),
    sqlite_autoincrement=True,
)


IS_ACTIVE = "status IN ('queued', 'processing')"
IS_HELD = "is_held AND status = 'queued'"
IS_RARE = "status IN ('failed', 'cancelled')"
IS_ENDED = "completed_at IS NOT NULL"
HAS_RARE_EFFECT = "effect_id IS NOT NULL AND status IN ('failed', 'cancelled')"
HAS_ENDED_EFFECT = "effect_id IS NOT NULL AND completed_at IS NOT NULL"
IS_REUSABLE = "fingerprint IS NOT NULL AND status = 'completed'"
HAS_OLD_PROMPT = "completed_at IS NOT NULL AND prompt_removed_at IS NULL"
ai_jobs = Table(
    "ai_jobs",
    tenant_metadata,
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
    Column("prompt", Document, nullable=False),  # as sent to the backend, except for asset names
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
    Column("video_id", Uuid),  # the media item that the job processes
    Column("batch_id", Uuid),
    Column("batch_position", Integer),
    Column("run_kind", String(20)),  # kind of the run that started the job: graph or pipeline
    Column("run_id", Uuid),
    # True if the job isn't in the queue yet, because its batch or run has enough jobs there.
    Column("is_held", Boolean, nullable=False, server_default=text("false")),
    CheckConstraint(
        "status IN ('queued', 'processing', 'completed', 'failed', 'cancelled')", name="status"
    ),
    # A job's prompt is removed a long time after the job has ended. The rest of the row is kept.
    Column("prompt_removed_at", Moment),
    # The number, client, extra data and outputs of a prompt that was submitted to the gateway.
    Column("gateway", Document),
    Column("hidden_at", Moment),  # when its client removed it from the history
    # A hash of the workflow, prompt and input files, for a job whose result may be reused.
    Column("fingerprint", String(64)),
    Column("reused_from", Uuid),  # the job whose result was reused instead of a run
    partial_index(
        "ai_jobs_reusable", "tenant_id", "user_id", "fingerprint", "completed_at", where=IS_REUSABLE
    ),
    partial_index(
        "ai_jobs_of_gateway",
        "tenant_id",
        "user_id",
        "completed_at",
        "submitted_at",
        "id",
        where="gateway IS NOT NULL AND hidden_at IS NULL",
    ),
    Index(None, "submitted_at", "id"),
    Index(None, "tenant_id", "submitted_at", "id"),
    Index("ai_jobs_of_user", "tenant_id", "user_id", "submitted_at", "id"),
    Index("ai_jobs_of_user_by_status", "tenant_id", "user_id", "status", "submitted_at", "id"),
    Index(None, "batch_id", "batch_position"),
    Index(None, "run_id"),
    # Keys are unique per user. Jobs without a user need another index, because nulls are distinct.
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
    partial_index(
        "ai_jobs_ended_of_effect", "effect_id", "submitted_at", "id", where=HAS_ENDED_EFFECT
    ),
    partial_index(
        "ai_jobs_rare_of_effect",
        "effect_id",
        "status",
        "submitted_at",
        "id",
        where=HAS_RARE_EFFECT,
    ),
    partial_index("ai_jobs_old_prompts", "completed_at", where=HAS_OLD_PROMPT),
)

job_attempts = Table(
    "job_attempts",
    tenant_metadata,
    Column("job_id", Uuid, ForeignKey("ai_jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("lease_number", Integer, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("worker_id", String(200), nullable=False),
    Column("started_at", Moment, nullable=False),
    # Values that the worker added to the prompt before sending it. Null after the prompt's removal.
    Column("filled_in", Document),
)

# Messages of runs as sent by their backends, for clients that use ComfyUI's protocol.
run_events = Table(
    "run_events",
    tenant_metadata,
    Column("id", RowId, primary_key=True),  # used as the readers' cursor
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),
    Column("job_id", Uuid, ForeignKey("ai_jobs.id", ondelete="CASCADE"), nullable=False),
    Column("lease_number", Integer, nullable=False),
    Column("client_id", String(200)),
    Column("prompt_id", String(100), nullable=False),  # the id that the client uses
    Column("events", Document, nullable=False),
    Column("record", Document),  # status, outputs and meta for the history; in the last row only
    Column("created_at", Moment, nullable=False),
    # The worker's report number. Null if it doesn't number reports or the control plane wrote this.
    Column("report", BigInteger),
    Column("has_start", Boolean, nullable=False, server_default=text("false")),
    Column("has_end", Boolean, nullable=False, server_default=text("false")),
    # The id of the row with which this attempt of the prompt started, or 0 in that row itself. Null
    # means that sockets show the row immediately instead of showing one prompt after another.
    Column("start_id", BigInteger),
    Index(None, "job_id", "id"),
    Index(None, "tenant_id", "user_id", "id"),
    partial_index("run_events_unfinished", "created_at", where="record IS NULL"),
    # A repeated report counts once. A prompt has one start, one end and one history record.
    partial_index(
        "run_events_report",
        "job_id",
        "lease_number",
        "report",
        where="report IS NOT NULL",
        unique=True,
    ),
    partial_index("run_events_start", "job_id", where="has_start", unique=True),
    partial_index("run_events_end", "job_id", where="has_end", unique=True),
    partial_index("run_events_record", "job_id", where="record IS NOT NULL", unique=True),
    partial_index("run_events_attempt", "job_id", "lease_number", where="start_id = 0"),
    sqlite_autoincrement=True,
)

# The newest preview image of a running job, if its viewer and its worker use different control
# planes. The table is unlogged on PostgreSQL, because a preview is only useful for a moment.
job_previews = Table(
    "job_previews",
    tenant_metadata,
    Column("job_id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("preview", Document, nullable=False),
    Column("shown_at", Moment, nullable=False),
    Index(None, "tenant_id"),
)

# An upload whose name now belongs to another file.
IS_REPLACED = "folder = 'replaced'"
# Files of gateway users by the names that ComfyUI would give them.
gateway_files = Table(
    "gateway_files",
    tenant_metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("user_id", Uuid, primary_key=True),
    Column("folder", String(10), primary_key=True),  # input, output, temp or replaced
    Column("path", String(500), primary_key=True),  # including the subfolder
    Column("file_id", Uuid),  # set for an upload
    Column("job_id", Uuid),  # set for an output, which the job stores as `output`
    Column("output", String(200)),
    Column("created_at", Moment, nullable=False),
    Index(None, "job_id"),
    Index(None, "file_id"),
    partial_index("gateway_files_replaced", "created_at", where=IS_REPLACED),
)

# The last value of ComfyUI's counter in file names such as ComfyUI_00001_.png.
gateway_counters = Table(
    "gateway_counters",
    tenant_metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("user_id", Uuid, primary_key=True),
    Column("folder", String(10), primary_key=True),
    Column("prefix", String(500), primary_key=True),
    Column("last", Integer, nullable=False),
)

# Files that an editor stores on its server, such as settings and workflows.
gateway_userdata = Table(
    "gateway_userdata",
    tenant_metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("user_id", Uuid, primary_key=True),
    Column("path", String(500), primary_key=True),
    Column("data", LargeBinary, nullable=False),
    Column("size", Integer, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("modified_at", Moment, nullable=False),
)

files = Table(
    "files",
    tenant_metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid),
    Column("disk", String(20), nullable=False),  # local or s3
    Column("path", Text, nullable=False),  # the key in object storage
    Column("filename", String(300), nullable=False),
    Column("mime_type", String(200), nullable=False),
    Column("size", BigInteger),  # null while the file is only announced
    Column("content_hash", String(64)),
    Column("metadata", Json, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("checked_at", Moment),  # when its content was checked
    Column("kept_from", Moment),  # start of its retention; null means created_at
    Index(None, "tenant_id", "content_hash"),
    Index(None, "tenant_id", "created_at"),
    Index(None, "path"),
    partial_index("files_unchecked", "created_at", where="checked_at IS NULL"),
    partial_index("files_unchecked_of_tenant", "tenant_id", where="checked_at IS NULL"),
)

# Total bytes of a tenant's checked files. The few unchecked files are summed separately.
storage_use = Table(
    "storage_use",
    tenant_metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("bytes", BigInteger, nullable=False),
)

outbox = Table(
    "outbox",
    tenant_metadata,
    Column("id", RowId, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("job_id", Uuid, nullable=False),
    Column("kind", String(50), nullable=False),
    Column("payload", Json, nullable=False),
    Column("tries", Integer, nullable=False, server_default="0"),
    Column("not_before", Moment, nullable=False),
    Column("created_at", Moment, nullable=False),
    Index(None, "not_before", "id"),
    sqlite_autoincrement=True,  # ids must not be reused, because rows are deleted by id later
)

users = Table(
    "users",
    tenant_metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("email", String(320)),
    Column("name", String(200)),
    Column("is_active", Boolean, nullable=False),
    Column("created_at", Moment, nullable=False),
    UniqueConstraint("tenant_id", "email"),
    Index(None, "tenant_id", "created_at", "id"),
)

videos = Table(
    "videos",  # media of any kind; named as in the API
    tenant_metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),
    Column("kind", String(20), nullable=False),
    Column("original_file_id", Uuid),  # null after it has expired
    Column("processed_file_id", Uuid),
    Column("job_id", Uuid),  # the latest job
    Column("active_job_id", Uuid),  # the latest job until it ends
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

# Links that show a user's result to people without a key.
shares = Table(
    "shares",
    tenant_metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),
    Column("job_id", Uuid, nullable=False),
    Column("video_id", Uuid),  # null if the job had no media as input
    Column("has_original", Boolean, nullable=False),
    Column("secret_hash", String(64), nullable=False, unique=True),
    Column("created_at", Moment, nullable=False),
    Column("expires_at", Moment, nullable=False),
    Column("revoked_at", Moment),
    Index(None, "tenant_id", "user_id", "created_at", "id"),
    Index(None, "expires_at"),
)

job_events = Table(
    "job_events",
    tenant_metadata,
    Column("id", RowId, primary_key=True),  # used as the readers' cursor
    Column("tenant_id", Uuid, nullable=False),
    Column("job_id", Uuid, nullable=False),
    Column("kind", String(20), nullable=False),
    Column("data", Json, nullable=False),
    Column("created_at", Moment, nullable=False),
    Index(None, "tenant_id", "job_id", "id"),
    Index(None, "created_at"),
    # If the id of a removed row were reused, a reader would miss the new event.
    sqlite_autoincrement=True,
)

batches = Table(
    "batches",
    tenant_metadata,
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

webhooks = Table(
    "webhooks",
    tenant_metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),
    Column("url", Text, nullable=False),
    Column("secret", String(100), nullable=False),  # empty if derived from the central key
    Column("events", Json, nullable=False),
    Column("is_active", Boolean, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("on_again_at", Moment),  # time of reactivation; earlier failures don't count
    Index(None, "tenant_id", "user_id"),
)

webhook_deliveries = Table(
    "webhook_deliveries",
    tenant_metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("webhook_id", Uuid, ForeignKey("webhooks.id", ondelete="CASCADE"), nullable=False),
    Column("job_id", Uuid, nullable=False),
    Column("event", String(50), nullable=False),
    Column("payload", Json, nullable=False),
    Column("status", String(20), nullable=False),
    Column("tries", Integer, nullable=False),
    Column("not_before", Moment, nullable=False),
    Column("last_status", Integer),  # status code from the customer's server
    Column("last_error", Text),
    Column("created_at", Moment, nullable=False),
    Column("ended_at", Moment),
    Column("url", Text),  # the job's own callback URL; null means the webhook's
    UniqueConstraint("webhook_id", "job_id", "event"),
    CheckConstraint("status IN ('pending', 'delivered', 'failed')", name="status"),
    Index(None, "webhook_id", "created_at", "id"),
    partial_index("webhook_deliveries_due", "not_before", where="status = 'pending'"),
)

graphs = Table(
    "graphs",
    tenant_metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),  # the creator; all users of the tenant can run it
    Column("name", String(200), nullable=False),
    Column("version", Integer, nullable=False),  # the newest version
    Column("created_at", Moment, nullable=False),
    Column("deleted_at", Moment),  # null unless deleted; the runs are kept
    Index(None, "tenant_id", "created_at", "id"),
)

graph_versions = Table(
    "graph_versions",
    tenant_metadata,
    Column("graph_id", Uuid, ForeignKey("graphs.id", ondelete="CASCADE"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("document", Document, nullable=False),
    Column("created_at", Moment, nullable=False),
)

graph_runs = Table(
    "graph_runs",
    tenant_metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),  # the user who started the run and pays for it
    Column("graph_id", Uuid, nullable=False),
    Column("graph_version", Integer, nullable=False),
    Column("snapshot", Document, nullable=False),  # the graph and its workflows at the start
    Column("inputs", Document, nullable=False),
    Column("max_tokens", BigInteger),
    Column("status", String(20), nullable=False),
    Column("revision", BigInteger, nullable=False),  # increases with each change
    Column("tokens", BigInteger, nullable=False),
    Column("error", Document),
    Column("outputs", Document),
    Column("created_at", Moment, nullable=False),
    Column("changed_at", Moment, nullable=False),
    Column("ended_at", Moment),
    Column("deadline_at", Moment),  # time at which the run fails; null means no deadline
    Column("paused_at", Moment),  # a paused run starts no jobs; null if not paused
    Column("rerun_of", Uuid),  # the run whose results are reused
    Column("rerun", Document),  # the start node and the changes
    Column("cut", Document),  # where the last decision stopped if it was incomplete
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
    partial_index("graph_runs_reruns", "rerun_of", where="rerun_of IS NOT NULL"),
)

graph_executions = Table(
    "graph_executions",
    tenant_metadata,
    Column("run_id", Uuid, ForeignKey("graph_runs.id", ondelete="CASCADE"), primary_key=True),
    Column("node", String(64), primary_key=True),
    Column("at", String(64), primary_key=True),  # index with a number for each enclosing fan-out
    Column("tenant_id", Uuid, nullable=False),
    Column("record", Document, nullable=False),
)

# Schedules and incoming webhooks that start runs.
triggers = Table(
    "triggers",
    tenant_metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),  # the user who owns and pays for the runs
    Column("name", String(200), nullable=False),
    Column("kind", String(20), nullable=False),
    Column("graph_id", Uuid),
    Column("graph_version", Integer),  # null means the newest
    Column("pipeline_id", Uuid),
    Column("base_candidates", Integer),  # for runs of a pipeline
    Column("inputs", Document, nullable=False),
    Column("cron", String(100)),
    Column("timezone", String(64), nullable=False),
    Column("catch_up", Boolean, nullable=False),
    Column("tokens_per_day", BigInteger, nullable=False),
    Column("max_tokens", BigInteger),  # limit per run
    Column("is_paused", Boolean, nullable=False),
    Column("next_at", Moment),  # next due time of a schedule
    Column("missed", Integer, nullable=False),
    Column("missed_at", Moment),
    # Increases with each new secret. The secrets themselves aren't stored.
    Column("secret_number", Integer, nullable=False),
    Column("created_at", Moment, nullable=False),
    CheckConstraint("kind IN ('schedule', 'webhook')", name="kind"),
    Index(None, "tenant_id", "user_id", "created_at", "id"),
    partial_index("triggers_due", "next_at", where="next_at IS NOT NULL AND NOT is_paused"),
)

trigger_firings = Table(
    "trigger_firings",
    tenant_metadata,
    Column("id", Uuid, primary_key=True),  # derived from the trigger and the due time or delivery
    Column("tenant_id", Uuid, nullable=False),
    Column("trigger_id", Uuid, ForeignKey("triggers.id", ondelete="CASCADE"), nullable=False),
    Column("cause", String(20), nullable=False),
    Column("planned_at", Moment),  # the scheduled time
    Column("day", String(10), nullable=False),  # day in the trigger's time zone, for the limit
    Column("status", String(20), nullable=False),
    Column("granted_tokens", BigInteger, nullable=False),
    Column("inputs", Document),  # null after the firing has ended
    Column("run_id", Uuid),
    Column("error_code", String(50)),
    Column("error", Text),
    Column("missed", Integer, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("not_before", Moment, nullable=False),  # when any process may continue the firing
    Column("created_at", Moment, nullable=False),
    Column("ended_at", Moment),
    CheckConstraint("status IN ('starting', 'started', 'refused', 'missed')", name="status"),
    Index(None, "trigger_id", "created_at", "id"),
    Index(None, "trigger_id", "day"),
    Index(None, "created_at"),
    partial_index("trigger_firings_starting", "not_before", where="status = 'starting'"),
)

# Keys (ids or signatures) that identify repeated deliveries to an incoming webhook.
trigger_delivery_keys = Table(
    "trigger_delivery_keys",
    tenant_metadata,
    Column("trigger_id", Uuid, ForeignKey("triggers.id", ondelete="CASCADE"), primary_key=True),
    Column("key_hash", String(64), primary_key=True),
    # Keys are kept as long as the firing, which is much longer than signatures are valid.
    Column("firing_id", Uuid, ForeignKey("trigger_firings.id", ondelete="CASCADE"), nullable=False),
    Column("created_at", Moment, nullable=False),
    Index(None, "firing_id"),
)

token_wallets = Table(
    "token_wallets",
    tenant_metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("user_id", Uuid, primary_key=True),
    Column("balance", BigInteger, nullable=False),
    Column("created_at", Moment, nullable=False),
    CheckConstraint("balance >= 0", name="balance"),
)

token_transactions = Table(
    "token_transactions",
    tenant_metadata,
    Column("id", RowId, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),
    Column("job_id", Uuid),
    Column("type", String(20), nullable=False),
    Column("amount", BigInteger, nullable=False),  # change of the balance; negative if reserved
    Column("provider_transaction_id", String(200)),
    Column("created_at", Moment, nullable=False),
    UniqueConstraint("tenant_id", "job_id", "type"),
    UniqueConstraint("tenant_id", "provider_transaction_id"),
    CheckConstraint(
        "(type = 'PAYMENT_CREDIT' AND amount > 0 AND provider_transaction_id IS NOT NULL)"
        " OR (type = 'JOB_RESERVE' AND amount < 0 AND job_id IS NOT NULL)"
        " OR (type = 'JOB_CONSUME' AND amount >= 0 AND job_id IS NOT NULL)"
        " OR (type = 'JOB_REFUND' AND amount > 0 AND job_id IS NOT NULL)",
        name="amount",
    ),
    Index(None, "tenant_id", "user_id", "id"),
    partial_index(
        "token_transactions_settled",  # a job's tokens are either consumed or refunded, only once
        "tenant_id",
        "job_id",
        where="type IN ('JOB_CONSUME', 'JOB_REFUND')",
        unique=True,
    ),
)


def _make_immutable(table: Table) -> None:
    """Adds database triggers that prevent changes and deletions of rows."""
    name, says = table.name, f"rows of {table.name} are never changed"
    for act in ("UPDATE", "DELETE"):
        _after_create(
            table,
            "sqlite",
            f"CREATE TRIGGER {name}_no_{act.lower()} BEFORE {act} ON {name} "
            f"BEGIN SELECT RAISE(ABORT, '{says}'); END",
        )
    _after_create(
        table,
        "postgresql",
        f"CREATE FUNCTION {name}_kept() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{says}'; END $$",
    )
    _after_create(
        table,
        "postgresql",
        f"CREATE TRIGGER {name}_kept BEFORE UPDATE OR DELETE OR TRUNCATE ON {name} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {name}_kept()",
    )


def _after_create(table: Table, dialect: str, statement: str) -> None:
    ddl: Any = DDL(statement)  # type: ignore[no-untyped-call]
    event.listen(table, "after_create", ddl.execute_if(dialect=dialect))


_make_immutable(token_transactions)


__all__ = ["tenant_metadata"]
