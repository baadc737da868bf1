"""Attempts with what was sent, prompts that are removed in time, and indexes for what is listed."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Document, Moment

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

PARTS = {
    "held": (["tenant_id", "user_id", "submitted_at", "id"], "is_held AND status = 'queued'"),
    "rare": (["status", "submitted_at", "id"], "status IN ('failed', 'cancelled')"),
    "old_prompts": (["completed_at"], "completed_at IS NOT NULL AND prompt_removed_at IS NULL"),
}
LISTS = {
    "ai_jobs_submitted_at_id_index": ["submitted_at", "id"],
    "ai_jobs_of_user": ["tenant_id", "user_id", "submitted_at", "id"],
    "ai_jobs_of_user_by_status": ["tenant_id", "user_id", "status", "submitted_at", "id"],
}


def upgrade() -> None:
    op.add_column("ai_jobs", sa.Column("prompt_removed_at", Moment(), nullable=True))
    for name, columns in LISTS.items():
        op.create_index(name, "ai_jobs", columns)
    for name, (columns, where) in PARTS.items():
        _part(f"ai_jobs_{name}", "ai_jobs", columns, where)
    _attempts()
    op.create_index("files_use", "files", ["tenant_id", "size"])
    for name in ("original_file_id", "processed_file_id"):
        _part(f"videos_{name}", "videos", [name], f"{name} IS NOT NULL")


def _part(name: str, table: str, columns: list[str], where: str) -> None:
    op.create_index(
        name, table, columns, postgresql_where=sa.text(where), sqlite_where=sa.text(where)
    )


def _attempts() -> None:
    op.create_table(
        "job_attempts",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("lease_number", sa.Integer(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("worker_id", sa.String(200), nullable=False),
        sa.Column("started_at", Moment(), nullable=False),
        sa.Column("filled_in", Document, nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id"], ["ai_jobs.id"], name=op.f("job_attempts_job_id_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "lease_number", name=op.f("job_attempts_pkey")),
    )
