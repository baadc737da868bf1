"""Pipelines: their runs, jobs and candidates, and how people judged them."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Document, Json, Moment, RowId

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for make in TABLES:
        make()


def _pipelines() -> None:
    op.create_table(
        "pipelines",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("user_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("document", Document, nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pipelines_pkey")),
    )
    op.create_index(
        op.f("pipelines_tenant_id_user_id_created_at_id_index"),
        "pipelines",
        ["tenant_id", "user_id", "created_at", "id"],
        unique=False,
    )


def _pipeline_runs() -> None:
    op.create_table(
        "pipeline_runs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("user_id", sa.Uuid(), nullable=False),
        sa.Column("pipeline_id", sa.Uuid(), nullable=False),
        sa.Column("target_folder", sa.String(length=200), nullable=False),
        sa.Column("variables", Json, nullable=False),
        sa.Column("base_candidates", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("pause_reason", sa.String(length=50), nullable=True),
        sa.Column("reason", sa.String(length=50), nullable=True),
        sa.Column("trouble", sa.Text(), nullable=True),
        sa.Column("candidates_max", sa.Integer(), nullable=True),
        sa.Column("tokens_max", sa.BigInteger(), nullable=True),
        sa.Column("bytes_max", sa.BigInteger(), nullable=True),
        sa.Column("concurrent_jobs", sa.Integer(), nullable=False),
        sa.Column("until", Moment(), nullable=True),
        sa.Column("idempotency_key", sa.String(length=200), nullable=True),
        sa.Column("request_hash", sa.String(length=64), nullable=False),
        sa.Column("look_at", Moment(), nullable=True),
        sa.Column("served_at", Moment(), nullable=True),
        sa.Column("alerted_at", Moment(), nullable=True),
        sa.Column("created_at", Moment(), nullable=False),
        sa.Column("changed_at", Moment(), nullable=False),
        sa.Column("files_removed_at", Moment(), nullable=True),
        sa.CheckConstraint(
            "status IN ('active', 'paused', 'cancelled')", name=op.f("pipeline_runs_status_check")
        ),
        sa.ForeignKeyConstraint(
            ["pipeline_id"], ["pipelines.id"], name=op.f("pipeline_runs_pipeline_id_fkey")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pipeline_runs_pkey")),
        sa.UniqueConstraint(
            "tenant_id",
            "idempotency_key",
            name=op.f("pipeline_runs_tenant_id_idempotency_key_unique"),
        ),
    )
    op.create_index(
        op.f("pipeline_runs_changed_at_index"), "pipeline_runs", ["changed_at"], unique=False
    )
    op.create_index(op.f("pipeline_runs_look_at_index"), "pipeline_runs", ["look_at"], unique=False)
    op.create_index(
        op.f("pipeline_runs_tenant_id_user_id_created_at_id_index"),
        "pipeline_runs",
        ["tenant_id", "user_id", "created_at", "id"],
        unique=False,
    )


def _pipeline_jobs() -> None:
    op.create_table(
        "pipeline_jobs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("parent_id", sa.Uuid(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("seed", sa.String(length=20), nullable=True),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("timeout_seconds", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", Moment(), nullable=False),
        sa.Column("ended_at", Moment(), nullable=True),
        sa.CheckConstraint(
            "status IN ('in_flight', 'done', 'failed', 'retried', 'cancelled')",
            name=op.f("pipeline_jobs_status_check"),
        ),
        sa.ForeignKeyConstraint(
            ["run_id"], ["pipeline_runs.id"], name=op.f("pipeline_jobs_run_id_fkey")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pipeline_jobs_pkey")),
    )
    op.create_index(
        "pipeline_jobs_in_flight",
        "pipeline_jobs",
        ["run_id"],
        unique=False,
        postgresql_where=sa.text("status = 'in_flight'"),
        sqlite_where=sa.text("status = 'in_flight'"),
    )
    op.create_index(
        op.f("pipeline_jobs_run_id_ended_at_index"),
        "pipeline_jobs",
        ["run_id", "ended_at"],
        unique=False,
    )
    op.create_index(
        op.f("pipeline_jobs_run_id_step_parent_id_index"),
        "pipeline_jobs",
        ["run_id", "step", "parent_id"],
        unique=False,
    )


def _pipeline_candidates() -> None:
    op.create_table(
        "pipeline_candidates",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("parent_id", sa.Uuid(), nullable=True),
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("output_index", sa.Integer(), nullable=False),
        sa.Column("file_id", sa.Uuid(), nullable=True),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("mime_type", sa.String(length=200), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("seed", sa.String(length=20), nullable=True),
        sa.Column("properties", Json, nullable=False),
        sa.Column("score", sa.Double(), nullable=False),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("child_count", sa.Integer(), nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.CheckConstraint(
            "status IN ('active', 'approved', 'rejected', 'winner')",
            name=op.f("pipeline_candidates_status_check"),
        ),
        sa.ForeignKeyConstraint(
            ["run_id"], ["pipeline_runs.id"], name=op.f("pipeline_candidates_run_id_fkey")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pipeline_candidates_pkey")),
        sa.UniqueConstraint(
            "job_id", "output_index", name=op.f("pipeline_candidates_job_id_output_index_unique")
        ),
        sa.UniqueConstraint("run_id", "path", name=op.f("pipeline_candidates_run_id_path_unique")),
    )
    op.create_index(
        op.f("pipeline_candidates_run_id_created_at_id_index"),
        "pipeline_candidates",
        ["run_id", "created_at", "id"],
        unique=False,
    )
    op.create_index(
        op.f("pipeline_candidates_run_id_parent_id_index"),
        "pipeline_candidates",
        ["run_id", "parent_id"],
        unique=False,
    )


def _pipeline_judgements() -> None:
    op.create_table(
        "pipeline_judgements",
        sa.Column("id", RowId, nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("candidate_id", sa.Uuid(), nullable=False),
        sa.Column("before", sa.String(length=20), nullable=False),
        sa.Column("after", sa.String(length=20), nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.Column("undone_at", Moment(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id"], ["pipeline_runs.id"], name=op.f("pipeline_judgements_run_id_fkey")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pipeline_judgements_pkey")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("pipeline_judgements_candidate_id_id_index"),
        "pipeline_judgements",
        ["candidate_id", "id"],
        unique=False,
    )


def _pipeline_votes() -> None:
    op.create_table(
        "pipeline_votes",
        sa.Column("number", RowId, nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("winner_id", sa.Uuid(), nullable=False),
        sa.Column("loser_id", sa.Uuid(), nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.Column("undone_at", Moment(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id"], ["pipeline_runs.id"], name=op.f("pipeline_votes_run_id_fkey")
        ),
        sa.PrimaryKeyConstraint("number", name=op.f("pipeline_votes_pkey")),
        sa.UniqueConstraint("id", name=op.f("pipeline_votes_id_unique")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("pipeline_votes_run_id_number_index"),
        "pipeline_votes",
        ["run_id", "number"],
        unique=False,
    )


def _pipeline_events() -> None:
    op.create_table(
        "pipeline_events",
        sa.Column("id", RowId, nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.String(length=50), nullable=False),
        sa.Column("actor", sa.String(length=100), nullable=False),
        sa.Column("data", Json, nullable=False),
        sa.Column("is_audited", sa.Boolean(), nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pipeline_events_pkey")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("pipeline_events_run_id_id_index"), "pipeline_events", ["run_id", "id"], unique=False
    )
    op.create_index(
        "pipeline_events_untold",
        "pipeline_events",
        ["id"],
        unique=False,
        postgresql_where=sa.text("NOT is_audited"),
        sqlite_where=sa.text("NOT is_audited"),
    )


TABLES = (
    _pipelines,
    _pipeline_runs,
    _pipeline_jobs,
    _pipeline_candidates,
    _pipeline_judgements,
    _pipeline_votes,
    _pipeline_events,
)
