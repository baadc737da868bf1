"""Tables of the central database: tenants, keys, fleets, workers, workflows, effects and queue."""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
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
    desc,
    text,
)

from comfyfleet.server.db.dialect import Json, Moment, RowId, partial_index

NAMING_CONVENTION = {
    "ix": "%(table_name)s_%(column_0_N_name)s_index",
    "uq": "%(table_name)s_%(column_0_N_name)s_unique",
    "ck": "%(table_name)s_%(constraint_name)s_check",
    "fk": "%(table_name)s_%(column_0_N_name)s_fkey",
    "pk": "%(table_name)s_pkey",
}
central_metadata = MetaData(naming_convention=NAMING_CONVENTION)

tenants = Table(
    "tenants",
    central_metadata,
    Column("id", Uuid, primary_key=True),
    Column("name", String(200), nullable=False),
    Column("pool", String(100), nullable=False),
    Column("min_priority", Integer, nullable=False, server_default="-10"),
    Column("max_priority", Integer, nullable=False, server_default="10"),
    Column("max_queued", Integer),
    Column("created_at", Moment, nullable=False),
    Column("retention_days", Integer),  # null means the default in the settings
    Column("max_storage_bytes", BigInteger),  # null means the default in the settings
    Column("gateway", Json),  # rules for the tenant's prompts; null means the fleets' rules
    Column("show_backends", Boolean),  # whether users see backends; null means the default
    Column("erasing_at", Moment),  # start of the erasure; no new data is accepted from then on
    Column("erased_at", Moment),
)

workflows = Table(
    "workflows",
    central_metadata,
    Column("id", RowId, primary_key=True),
    Column("slug", String(100), nullable=False, unique=True),
    Column("version", Integer, nullable=False),  # the version for new jobs
    Column("required_capabilities", Json, nullable=False),
    Column("price_tokens", Integer, nullable=False, server_default="0"),
    Column("run_limit_seconds", Integer, nullable=False, server_default="3600"),
    Column("is_active", Boolean, nullable=False),
    Column("is_paused", Boolean, nullable=False, server_default=text("false")),
    Column("is_open", Boolean, nullable=False, server_default=text("false")),
    Column("created_at", Moment, nullable=False),
    # Whether customers may use the workflow in graphs and pipelines at its price. This doesn't
    # affect its effects.
    Column("is_offered", Boolean, nullable=False, server_default=text("false")),
    # Whether a result must contain a file or a value: required or optional.
    Column("output", String(10), nullable=False, server_default="required"),
    # How delivered files are marked as made by AI: auto, generated, edited or none.
    Column("ai_mark", String(10), nullable=False, server_default="auto"),
)

workflow_versions = Table(
    "workflow_versions",
    central_metadata,
    Column("workflow_id", BigInteger, ForeignKey("workflows.id"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("kind", String(20), nullable=False),  # workflow or prompt
    Column("document_key", Text, nullable=False),  # key in object storage
    Column("document_hash", String(64), nullable=False),
    Column("properties", Json, nullable=False),
    Column("output_node_id", String(200)),
    Column("node_types", Json, nullable=False),
    Column("models", Json, nullable=False),
    Column("created_at", Moment, nullable=False),
)

fleets = Table(
    "comfyui_fleets",
    central_metadata,
    Column("id", RowId, primary_key=True),
    Column("slug", String(100), nullable=False),
    Column("stage", String(50), nullable=False),
    Column("secret_hash", String(64), nullable=False),
    Column("max_workers", Integer),
    Column("open_workflow_id", BigInteger, ForeignKey("workflows.id")),
    Column("object_info_key", Text),  # key of the newest object_info
    Column("object_info_hash", String(64)),
    Column("created_at", Moment, nullable=False),
    Column("approval", String(10), nullable=False, server_default="auto"),  # auto or manual
    Column("gateway", Json),  # rules for prompts; null means no prompts
    Column("starts_within_seconds", Integer),  # startup time of machines that start on demand
    UniqueConstraint("slug", "stage"),
)

workflow_fleets = Table(
    "comfyui_workflow_fleets",
    central_metadata,
    Column("workflow_id", BigInteger, ForeignKey("workflows.id"), primary_key=True),
    Column("fleet_id", BigInteger, ForeignKey("comfyui_fleets.id"), primary_key=True),
    Column("created_at", Moment, nullable=False),
)

workers = Table(
    "comfyui_workers",
    central_metadata,
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
    # The backend problem that the worker reported. Null means that the worker accepts jobs.
    Column("backend_problem", String(20)),
    Column("facts", Json),  # GPU, memory, node types and model files; null until reported
    Column("facts_hash", String(64)),  # hash of the node types and model files
    Column("object_info_hash", String(64)),  # hash of the backend's object_info
    Column("refusals", Json),  # the backend's refusals since its last facts report
    Column("models_loaded", Json, nullable=False),
    Column("last_seen_at", Moment, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("revoked_at", Moment),  # never reset, because it blocks the id
    # A new key for the worker, in plain text. It is removed when the worker first uses it.
    Column("next_key", String(100)),
    Column("next_key_hash", String(64)),
    Index(None, "next_key_hash", unique=True),
    Index(None, "fleet_id"),
    Index(None, "last_seen_at"),
    # Otherwise, a new worker could get the row id of a removed one.
    sqlite_autoincrement=True,
)

worker_workflows = Table(
    "worker_workflows",
    central_metadata,
    Column(
        "worker_row_id",
        BigInteger,
        ForeignKey("comfyui_workers.id", ondelete="CASCADE"),
        primary_key=True,
    ),
    Column("workflow_id", BigInteger, ForeignKey("workflows.id"), primary_key=True),
)

worker_readings = Table(
    "worker_readings",
    central_metadata,
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
dispatches = Table(
    "ai_job_dispatches",
    central_metadata,
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
    # The number of leases so far. Unlike attempts, it never decreases, so the tenant's row can
    # refuse reports under older leases.
    Column("lease_number", Integer, nullable=False, server_default="0"),
    Column("lease_token", Uuid),
    Column("lease_expires_at", Moment),
    Column("worker_id", String(200)),
    Column("not_before", Moment),
    Column("avoid_worker_id", String(200)),
    Column("avoid_until", Moment),
    Column("model_key", String(300)),  # the largest model: a checkpoint or unet
    Column("model_set", String(64)),  # hash of all models in the prompt
    Column("backend_affinity", String(300)),  # worker:ID or fleet:SLUG/STAGE
    # This worker can lease a new job before others, because it ran an earlier prompt of the user or
    # accepted the user's last upload.
    Column("preferred_worker_id", String(200)),
    Column("is_poisoned", Boolean, nullable=False, server_default=text("false")),
    Column("cancel_requested", Boolean, nullable=False, server_default=text("false")),
    Column("recall_requested", Boolean, nullable=False, server_default=text("false")),
    Column("is_prefetched", Boolean, nullable=False, server_default=text("false")),
    Column("duration_seconds", Float),
    Column("last_error", Text),
    Column("created_at", Moment, nullable=False),
    Column("queued_at", Moment, nullable=False),
    Column("leased_at", Moment),
    Column("started_at", Moment),  # when the worker reported that the prompt runs
    Column("heard_at", Moment),  # time of the last heartbeat under this lease
    Column("ended_at", Moment),
    # The number of leases that expired before the job started. A job with many of them may be
    # crashing the workers.
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
    # Indexes for lists. They only contain ended jobs, so each index is written once per job.
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

# Durations of recent runs in seconds, which are used to estimate the cost of switching models.
model_switches = Table(
    "model_switches",
    central_metadata,
    Column("fleet_id", BigInteger, ForeignKey("comfyui_fleets.id"), primary_key=True),
    Column("model_key", String(300), primary_key=True),
    Column("workflow_id", BigInteger, ForeignKey("workflows.id"), primary_key=True),
    Column("stayed", Json, nullable=False),  # runs with the same model as the previous run
    Column("switched", Json, nullable=False),  # runs after a run with another model
    Column("updated_at", Moment, nullable=False),
    Index(None, "updated_at"),
)

# Calls to routes of custom nodes. The control plane that received a call forwards it to the one
# that a worker is connected to. A row exists while the caller waits for the response.
route_calls = Table(
    "route_calls",
    central_metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("fleet_ids", Json, nullable=False),  # fleets whose workers may take the call
    Column("status", String(20), nullable=False),
    Column("method", String(10), nullable=False),
    Column("path", Text, nullable=False),
    Column("target", Text, nullable=False),  # the path as sent, with the query
    Column("headers", Json, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("for_worker_id", String(200)),  # the only worker that may take the call; null means any
    Column("is_copy", Boolean, nullable=False, server_default=text("false")),
    Column("worker_id", String(200)),  # the worker that took the call
    Column("answer", Json),  # status and headers, or the failure
    Column("answer_body", LargeBinary),
    Column("created_at", Moment, nullable=False),
    Column("expires_at", Moment, nullable=False),
    CheckConstraint("status IN ('waiting', 'taken', 'answered')", name="status"),
    Index(None, "tenant_id"),
    Index(None, "expires_at"),
)

# The workers whose backends accepted a user's last pass-through upload.
backend_uploads = Table(
    "backend_uploads",
    central_metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("user_id", Uuid, primary_key=True),
    Column("worker_ids", Json, nullable=False),
    Column("accepted_at", Moment, nullable=False),
    Index(None, "accepted_at"),
)

# Sums for operators' charts, per minute, per 15 minutes and per two hours.
rollups = Table(
    "rollups",
    central_metadata,
    Column("step_seconds", Integer, primary_key=True),
    Column("at", Moment, primary_key=True),  # start of the time step
    Column("name", String(50), primary_key=True),
    Column("value", Float, nullable=False),
)

audit_log = Table(
    "audit_log",
    central_metadata,
    Column("id", RowId, primary_key=True),
    Column("at", Moment, nullable=False),
    Column("actor", String(200), nullable=False),
    Column("action", String(50), nullable=False),
    Column("subject", String(300), nullable=False),  # for example worker:gpu-7
    Column("tenant_id", Uuid),
    Column("details", Json, nullable=False),
    Column("source", String(200)),  # original row, if copied from a tenant's database
    partial_index("audit_log_source", "source", where="source IS NOT NULL", unique=True),
    Index(None, "subject", "id"),
    Index(None, "action", "id"),
    Index(None, "actor", "id"),
    Index(None, "tenant_id", "id"),
    # A small BRIN index is enough, because the rows are in chronological order.
    Index("audit_log_at", "at", postgresql_using="brin"),
)

operators = Table(
    "operators",
    central_metadata,
    Column("id", Uuid, primary_key=True),
    Column("name", String(100), nullable=False, unique=True),
    Column("role", String(20), nullable=False),
    Column("key_hash", String(64), nullable=False, unique=True),
    Column("prefix", String(20), nullable=False),  # start of the key, to recognize it
    Column("created_at", Moment, nullable=False),
    Column("created_by", String(200), nullable=False),
    Column("revoked_at", Moment),
    Column("last_used_at", Moment),
    CheckConstraint("role IN ('viewer', 'operator', 'owner')", name="role"),
)

control_state = Table(
    "control_state",
    central_metadata,
    Column("name", String(100), primary_key=True),
    Column("value", Json, nullable=False),
)

# Ensures that each payment is credited only once in the whole installation. A payment is claimed
# here before the wallet is credited. After an interruption, only the same wallet can be credited.
payments = Table(
    "payments",
    central_metadata,
    Column("provider_transaction_id", String(200), primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("user_id", Uuid, nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("created_at", Moment, nullable=False),
)

api_keys = Table(
    "api_keys",
    central_metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), nullable=False),
    Column("user_id", Uuid, nullable=False),  # a user in the tenant's pool
    Column("name", String(200), nullable=False),
    Column("key_hash", String(64), nullable=False, unique=True),
    Column("prefix", String(20), nullable=False),  # start of the key, to recognize it
    Column("scopes", Json, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("expires_at", Moment),
    Column("revoked_at", Moment),
    Column("last_used_at", Moment),
    Index(None, "tenant_id", "user_id"),
)

# Browser sessions of customers, operators, and users who are both.
sessions = Table(
    "sessions",
    central_metadata,
    Column("id", Uuid, primary_key=True),
    Column("secret_hash", String(64), nullable=False, unique=True),
    Column("created_at", Moment, nullable=False),
    Column("expires_at", Moment, nullable=False),  # the later of customer_until and operator_until
    Column("api_key_id", Uuid, ForeignKey("api_keys.id", ondelete="CASCADE")),
    Column("customer_until", Moment),
    Column("operator_id", Uuid, ForeignKey("operators.id", ondelete="CASCADE")),
    # Proves a sign-in with the admin key. Derived from the session's secret and the admin key.
    Column("admin_proof", String(64)),
    Column("operator_until", Moment),
    Index(None, "api_key_id"),
    Index(None, "operator_id"),
    Index(None, "expires_at"),
)

effects = Table(
    "effects",
    central_metadata,
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
    # The accepted media types. An empty list accepts all types of the effect's kind of media.
    Column("media_types", Json, nullable=False),
    Column("last_processing_time_seconds", Float),
    Column("typical_seconds", Float),  # median, so that one slow job doesn't affect it
    Column("created_at", Moment, nullable=False),
    Column("locked", Json, nullable=False, server_default="[]"),  # properties hidden from customers
    Column("keep_metadata", Boolean, nullable=False, server_default=text("false")),
    Column("tags", Json, nullable=False, server_default="[]"),
    Column("examples", Json, nullable=False, server_default="[]"),  # pairs of files: before, after
    Column("recent_seconds", Json, nullable=False, server_default="[]"),  # durations of recent runs
    # Whether a job may reuse the result of an identical job of the same user.
    Column("reuse", Boolean, nullable=False, server_default=text("false")),
    CheckConstraint("price_tokens >= 0", name="price_tokens"),
    CheckConstraint("provider IN ('self_hosted', 'cloud')", name="provider"),
    Index(None, "workflow_id"),
)
