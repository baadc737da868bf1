"""Adds the data of gateway prompts, the messages of their runs, and the files of gateway users."""

from typing import Any

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Document, Moment, RowId

revision = "gateway_1"
down_revision = "schema_1"
branch_labels = None
depends_on = None

OF_GATEWAY = sa.text("gateway IS NOT NULL AND hidden_at IS NULL")
UNFINISHED = sa.text("record IS NULL")
REPLACED = sa.text("folder = 'replaced'")
AMOUNTS = (
    "(type = 'PAYMENT_CREDIT' AND amount > 0 AND provider_transaction_id IS NOT NULL)"
    " OR (type = 'JOB_RESERVE' AND amount < 0 AND job_id IS NOT NULL)"
    " OR (type = 'JOB_CONSUME' AND amount {consumed} 0 AND job_id IS NOT NULL)"
    " OR (type = 'JOB_REFUND' AND amount > 0 AND job_id IS NOT NULL)"
)


def upgrade() -> None:
    op.add_column("ai_jobs", sa.Column("gateway", Document))
    op.add_column("ai_jobs", sa.Column("hidden_at", Moment))
    op.create_index(
        "ai_jobs_of_gateway",
        "ai_jobs",
        ["tenant_id", "user_id", "completed_at", "submitted_at", "id"],
        postgresql_where=OF_GATEWAY,
        sqlite_where=OF_GATEWAY,
    )
    op.add_column("webhook_deliveries", sa.Column("url", sa.Text))
    _add_run_events()
    _add_previews()
    _add_files()
    op.create_table(
        "gateway_userdata",
        *_of_user(),
        sa.Column("path", sa.String(500), primary_key=True),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
        sa.Column("created_at", Moment, nullable=False),
        sa.Column("modified_at", Moment, nullable=False),
    )
    _set_amounts(consumed=">=")


def _set_amounts(*, consumed: str) -> None:
    """Sets the check for amounts. With `>=`, a settlement may refund unused tokens. With `=`, it
    may not."""
    name, table = "token_transactions_amount_check", "token_transactions"
    condition = AMOUNTS.format(consumed=consumed)
    bind = op.get_bind()
    if bind.dialect.name != "sqlite":
        op.drop_constraint(op.f(name), table, type_="check")
        op.create_check_constraint(op.f(name), table, condition)
        return
    # SQLite can't change a constraint, so the table is created again with its indexes and triggers.
    query = "SELECT type, sql FROM sqlite_master WHERE tbl_name = 'token_transactions' AND sql IS NOT NULL"
    objects = bind.execute(sa.text(query)).all()
    (before,) = (sql for kind, sql in objects if kind == "table")
    after = before.replace(*(f"'JOB_CONSUME' AND amount {sign} 0" for sign in _both(consumed)))
    op.execute("ALTER TABLE token_transactions RENAME TO token_transactions_before")
    op.execute(sa.text(after.replace(":", r"\:")))
    op.execute("INSERT INTO token_transactions SELECT * FROM token_transactions_before")
    op.execute("DROP TABLE token_transactions_before")
    for kind, sql in objects:
        if kind != "table":
            op.execute(sa.text(sql.replace(":", r"\:")))


def _both(consumed: str) -> tuple[str, str]:
    return ("=", ">=") if consumed == ">=" else (">=", "=")


def _of_user() -> tuple[sa.Column[Any], sa.Column[Any]]:
    return (
        sa.Column("tenant_id", sa.Uuid, primary_key=True),
        sa.Column("user_id", sa.Uuid, primary_key=True),
    )


def _add_run_events() -> None:
    op.create_table(
        "run_events",
        sa.Column("id", RowId, primary_key=True),
        sa.Column("tenant_id", sa.Uuid, nullable=False),
        sa.Column("user_id", sa.Uuid, nullable=False),
        sa.Column(
            "job_id", sa.Uuid, sa.ForeignKey("ai_jobs.id", ondelete="CASCADE"), nullable=False
        ),
        sa.Column("lease_number", sa.Integer, nullable=False),
        sa.Column("client_id", sa.String(200)),
        sa.Column("prompt_id", sa.String(100), nullable=False),
        sa.Column("events", Document, nullable=False),
        sa.Column("record", Document),
        sa.Column("created_at", Moment, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("run_events_job_id_id_index", "run_events", ["job_id", "id"])
    op.create_index(
        "run_events_tenant_id_user_id_id_index", "run_events", ["tenant_id", "user_id", "id"]
    )
    op.create_index(
        "run_events_unfinished",
        "run_events",
        ["created_at"],
        postgresql_where=UNFINISHED,
        sqlite_where=UNFINISHED,
    )


def _add_previews() -> None:
    op.create_table(
        "job_previews",
        sa.Column("job_id", sa.Uuid, primary_key=True),
        sa.Column("tenant_id", sa.Uuid, nullable=False),
        sa.Column("preview", Document, nullable=False),
        sa.Column("shown_at", Moment, nullable=False),
    )
    op.create_index("job_previews_tenant_id_index", "job_previews", ["tenant_id"])
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE job_previews SET UNLOGGED")


def _add_files() -> None:
    op.create_table(
        "gateway_files",
        *_of_user(),
        sa.Column("folder", sa.String(10), primary_key=True),
        sa.Column("path", sa.String(500), primary_key=True),
        sa.Column("file_id", sa.Uuid),
        sa.Column("job_id", sa.Uuid),
        sa.Column("output", sa.String(200)),
        sa.Column("created_at", Moment, nullable=False),
    )
    op.create_index("gateway_files_job_id_index", "gateway_files", ["job_id"])
    op.create_index("gateway_files_file_id_index", "gateway_files", ["file_id"])
    op.create_index(
        "gateway_files_replaced",
        "gateway_files",
        ["created_at"],
        postgresql_where=REPLACED,
        sqlite_where=REPLACED,
    )
    op.create_table(
        "gateway_counters",
        *_of_user(),
        sa.Column("folder", sa.String(10), primary_key=True),
        sa.Column("prefix", sa.String(500), primary_key=True),
        sa.Column("last", sa.Integer, nullable=False),
    )


def downgrade() -> None:
    _set_amounts(consumed="=")
    added = ("gateway_userdata", "gateway_counters", "gateway_files", "job_previews", "run_events")
    for table in added:
        op.drop_table(table)
    op.drop_column("webhook_deliveries", "url")
    op.drop_index("ai_jobs_of_gateway", "ai_jobs")
    op.drop_column("ai_jobs", "hidden_at")
    op.drop_column("ai_jobs", "gateway")
