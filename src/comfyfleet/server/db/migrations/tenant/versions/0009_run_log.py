"""Adds unique indexes to the run log, so that each report, start, end and record exists once."""

import sqlalchemy as sa
from alembic import op

revision = "run_log_1"
down_revision = "judges_1"
branch_labels = None
depends_on = None

# If its reports were repeated, a prompt may have several records. The newest one remains, because
# readers used it.
DROP_REPEATED_RECORDS = """
UPDATE run_events SET record = NULL WHERE record IS NOT NULL AND EXISTS (
    SELECT 1 FROM run_events AS newer
    WHERE newer.job_id = run_events.job_id AND newer.record IS NOT NULL AND newer.id > run_events.id
)
"""
# Prompts that are running during the upgrade have already reported their start.
MARK_STARTS = """
UPDATE run_events SET has_start = true WHERE id IN (
    SELECT min(run_events.id) FROM run_events JOIN ai_jobs ON ai_jobs.id = run_events.job_id
    WHERE ai_jobs.status IN ('queued', 'processing')
        AND CAST(run_events.events AS text) LIKE '%"execution_start"%'
    GROUP BY run_events.job_id
)
"""
UNIQUE_INDEXES = {
    "run_events_report": (["job_id", "lease_number", "report"], "report IS NOT NULL"),
    "run_events_start": (["job_id"], "has_start"),
    "run_events_end": (["job_id"], "has_end"),
    "run_events_record": (["job_id"], "record IS NOT NULL"),
}


def upgrade() -> None:
    op.add_column("run_events", sa.Column("report", sa.BigInteger))
    for name in ("has_start", "has_end"):
        op.add_column(
            "run_events",
            sa.Column(name, sa.Boolean, nullable=False, server_default=sa.text("false")),
        )
    op.execute(DROP_REPEATED_RECORDS)
    op.execute(MARK_STARTS)
    for name, (columns, where) in UNIQUE_INDEXES.items():
        op.create_index(
            name,
            "run_events",
            columns,
            unique=True,
            postgresql_where=sa.text(where),
            sqlite_where=sa.text(where),
        )


def downgrade() -> None:
    for name in UNIQUE_INDEXES:
        op.drop_index(name, "run_events")
    for name in ("has_end", "has_start", "report"):
        op.drop_column("run_events", name)
