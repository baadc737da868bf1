"""Customers: what they need of a tenant pool."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Json, Moment, RowId

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for make in TABLES:
        make()
    _more_of_ai_jobs()
    _more_of_files()
    _never_changed("token_transactions")


def _more_of_ai_jobs() -> None:
    held: sa.Column[bool] = sa.Column(
        "is_held", sa.Boolean(), server_default=sa.text("false"), nullable=False
    )
    for column in (
        sa.Column("video_id", sa.Uuid()),
        sa.Column("batch_id", sa.Uuid()),
        sa.Column("batch_position", sa.Integer()),
        sa.Column("run_kind", sa.String(length=20)),
        sa.Column("run_id", sa.Uuid()),
        held,
    ):
        op.add_column("ai_jobs", column)
    op.create_index(
        "ai_jobs_batch_id_batch_position_index", "ai_jobs", ["batch_id", "batch_position"]
    )
    op.create_index("ai_jobs_run_id_index", "ai_jobs", ["run_id"])


def _more_of_files() -> None:
    op.add_column("files", sa.Column("checked_at", Moment()))
    op.create_index("files_tenant_id_created_at_index", "files", ["tenant_id", "created_at"])
    op.create_index("files_path_index", "files", ["path"])
    unchecked = sa.text("checked_at IS NULL")
    op.create_index(
        "files_unchecked",
        "files",
        ["created_at"],
        postgresql_where=unchecked,
        sqlite_where=unchecked,
    )


def _never_changed(name: str) -> None:
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


def _batches() -> None:
    op.create_table(
        "batches",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("user_id", sa.Uuid(), nullable=False),
        sa.Column("effect_id", sa.Uuid(), nullable=False),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.Column("idempotency_key", sa.String(length=200), nullable=True),
        sa.Column("request_hash", sa.String(length=64), nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.Column("cancelled_at", Moment(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("batches_pkey")),
        sa.UniqueConstraint(
            "tenant_id", "idempotency_key", name=op.f("batches_tenant_id_idempotency_key_unique")
        ),
    )
    op.create_index(
        op.f("batches_tenant_id_user_id_created_at_id_index"),
        "batches",
        ["tenant_id", "user_id", "created_at", "id"],
        unique=False,
    )


def _job_events() -> None:
    op.create_table(
        "job_events",
        sa.Column("id", RowId, nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("data", Json, nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("job_events_pkey")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("job_events_created_at_index"), "job_events", ["created_at"], unique=False)
    op.create_index(
        op.f("job_events_tenant_id_job_id_id_index"),
        "job_events",
        ["tenant_id", "job_id", "id"],
        unique=False,
    )


def _token_transactions() -> None:
    op.create_table(
        "token_transactions",
        sa.Column("id", RowId, nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("user_id", sa.Uuid(), nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=True),
        sa.Column("type", sa.String(length=20), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("provider_transaction_id", sa.String(length=200), nullable=True),
        sa.Column("created_at", Moment(), nullable=False),
        sa.CheckConstraint(
            "(type = 'PAYMENT_CREDIT' AND amount > 0 AND provider_transaction_id IS NOT NULL) OR (type = 'JOB_RESERVE' AND amount < 0 AND job_id IS NOT NULL) OR (type = 'JOB_CONSUME' AND amount = 0 AND job_id IS NOT NULL) OR (type = 'JOB_REFUND' AND amount > 0 AND job_id IS NOT NULL)",
            name=op.f("token_transactions_amount_check"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("token_transactions_pkey")),
        sa.UniqueConstraint(
            "tenant_id",
            "job_id",
            "type",
            name=op.f("token_transactions_tenant_id_job_id_type_unique"),
        ),
        sa.UniqueConstraint(
            "tenant_id",
            "provider_transaction_id",
            name=op.f("token_transactions_tenant_id_provider_transaction_id_unique"),
        ),
    )
    op.create_index(
        "token_transactions_settled",
        "token_transactions",
        ["tenant_id", "job_id"],
        unique=True,
        postgresql_where=sa.text("type IN ('JOB_CONSUME', 'JOB_REFUND')"),
        sqlite_where=sa.text("type IN ('JOB_CONSUME', 'JOB_REFUND')"),
    )
    op.create_index(
        op.f("token_transactions_tenant_id_user_id_id_index"),
        "token_transactions",
        ["tenant_id", "user_id", "id"],
        unique=False,
    )


def _token_wallets() -> None:
    op.create_table(
        "token_wallets",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("user_id", sa.Uuid(), nullable=False),
        sa.Column("balance", sa.BigInteger(), nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.CheckConstraint("balance >= 0", name=op.f("token_wallets_balance_check")),
        sa.PrimaryKeyConstraint("tenant_id", "user_id", name=op.f("token_wallets_pkey")),
    )


def _users() -> None:
    op.create_table(
        "users",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("email", sa.String(length=320), nullable=True),
        sa.Column("name", sa.String(length=200), nullable=True),
        sa.Column("is_active", sa.Boolean(), nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("users_pkey")),
        sa.UniqueConstraint("tenant_id", "email", name=op.f("users_tenant_id_email_unique")),
    )
    op.create_index(
        op.f("users_tenant_id_created_at_id_index"),
        "users",
        ["tenant_id", "created_at", "id"],
        unique=False,
    )


def _videos() -> None:
    op.create_table(
        "videos",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("user_id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("original_file_id", sa.Uuid(), nullable=True),
        sa.Column("processed_file_id", sa.Uuid(), nullable=True),
        sa.Column("job_id", sa.Uuid(), nullable=True),
        sa.Column("active_job_id", sa.Uuid(), nullable=True),
        sa.Column("processing_details", Json, nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.Column("expired_at", Moment(), nullable=True),
        sa.CheckConstraint("kind IN ('image', 'video', 'audio')", name=op.f("videos_kind_check")),
        sa.PrimaryKeyConstraint("id", name=op.f("videos_pkey")),
    )
    op.create_index(
        "videos_age",
        "videos",
        ["tenant_id", "created_at"],
        unique=False,
        postgresql_where=sa.text("expired_at IS NULL"),
        sqlite_where=sa.text("expired_at IS NULL"),
    )
    op.create_index(op.f("videos_job_id_index"), "videos", ["job_id"], unique=False)
    op.create_index(
        op.f("videos_tenant_id_user_id_created_at_id_index"),
        "videos",
        ["tenant_id", "user_id", "created_at", "id"],
        unique=False,
    )


def _webhooks() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("user_id", sa.Uuid(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secret", sa.String(length=100), nullable=False),
        sa.Column("events", Json, nullable=False),
        sa.Column("is_active", sa.Boolean(), nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("webhooks_pkey")),
    )
    op.create_index(
        op.f("webhooks_tenant_id_user_id_index"), "webhooks", ["tenant_id", "user_id"], unique=False
    )


def _webhook_deliveries() -> None:
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("webhook_id", sa.Uuid(), nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("event", sa.String(length=50), nullable=False),
        sa.Column("payload", Json, nullable=False),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("not_before", Moment(), nullable=False),
        sa.Column("last_status", sa.Integer(), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("created_at", Moment(), nullable=False),
        sa.Column("ended_at", Moment(), nullable=True),
        sa.CheckConstraint(
            "status IN ('pending', 'delivered', 'failed')",
            name=op.f("webhook_deliveries_status_check"),
        ),
        sa.ForeignKeyConstraint(
            ["webhook_id"],
            ["webhooks.id"],
            name=op.f("webhook_deliveries_webhook_id_fkey"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("webhook_deliveries_pkey")),
        sa.UniqueConstraint(
            "webhook_id",
            "job_id",
            "event",
            name=op.f("webhook_deliveries_webhook_id_job_id_event_unique"),
        ),
    )
    op.create_index(
        "webhook_deliveries_due",
        "webhook_deliveries",
        ["not_before"],
        unique=False,
        postgresql_where=sa.text("status = 'pending'"),
        sqlite_where=sa.text("status = 'pending'"),
    )
    op.create_index(
        op.f("webhook_deliveries_webhook_id_created_at_id_index"),
        "webhook_deliveries",
        ["webhook_id", "created_at", "id"],
        unique=False,
    )


TABLES = (
    _batches,
    _job_events,
    _token_transactions,
    _token_wallets,
    _users,
    _videos,
    _webhooks,
    _webhook_deliveries,
)
