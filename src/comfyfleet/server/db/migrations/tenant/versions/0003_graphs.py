"""Graphs: documents, versions, runs and their executions."""

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Document, Moment

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _graphs()
    _graph_versions()
    _graph_runs()
    _graph_executions()


def _graphs() -> None:
    op.create_table(
        "graphs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("user_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("graphs_pkey")),
    )
    op.create_index(
        op.f("graphs_tenant_id_created_at_id_index"),
        "graphs",
        ["tenant_id", "created_at", "id"],
        unique=False,
    )


def _graph_versions() -> None:
    op.create_table(
        "graph_versions",
        sa.Column("graph_id", sa.Uuid(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("document", Document, nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.ForeignKeyConstraint(
            ["graph_id"],
            ["graphs.id"],
            name=op.f("graph_versions_graph_id_fkey"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("graph_id", "version", name=op.f("graph_versions_pkey")),
    )


def _graph_runs() -> None:
    op.create_table(
        "graph_runs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("user_id", sa.Uuid(), nullable=False),
        sa.Column("graph_id", sa.Uuid(), nullable=False),
        sa.Column("graph_version", sa.Integer(), nullable=False),
        sa.Column("snapshot", Document, nullable=False),
        sa.Column("inputs", Document, nullable=False),
        sa.Column("max_tokens", sa.BigInteger(), nullable=True),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("error", Document, nullable=True),
        sa.Column("outputs", Document, nullable=True),
        sa.Column("created_at", Moment(), nullable=False),
        sa.Column("changed_at", Moment(), nullable=False),
        sa.Column("ended_at", Moment(), nullable=True),
        sa.CheckConstraint(
            "status IN ('pending', 'running', 'waiting_for_user', 'completed', 'failed', "
            "'cancelled')",
            name=op.f("graph_runs_status_check"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("graph_runs_pkey")),
    )
    op.create_index(
        op.f("graph_runs_tenant_id_user_id_created_at_id_index"),
        "graph_runs",
        ["tenant_id", "user_id", "created_at", "id"],
        unique=False,
    )
    going_on = sa.text("status IN ('pending', 'running', 'waiting_for_user')")
    op.create_index(
        "graph_runs_going_on",
        "graph_runs",
        ["id"],
        unique=False,
        postgresql_where=going_on,
        sqlite_where=going_on,
    )


def _graph_executions() -> None:
    op.create_table(
        "graph_executions",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("node", sa.String(length=64), nullable=False),
        sa.Column("at", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("record", Document, nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["graph_runs.id"],
            name=op.f("graph_executions_run_id_fkey"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("run_id", "node", "at", name=op.f("graph_executions_pkey")),
    )
