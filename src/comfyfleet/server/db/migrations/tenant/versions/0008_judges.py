"""Adds judges of pipelines: their jobs, their scores, and who judged a candidate."""

import sqlalchemy as sa
from alembic import op

revision = "judges_1"
down_revision = "rerun_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "pipeline_jobs",
        sa.Column("is_judge", sa.Boolean, nullable=False, server_default=sa.text("false")),
    )
    op.add_column("pipeline_candidates", sa.Column("judged_by", sa.String(20)))
    op.add_column("pipeline_candidates", sa.Column("judge_score", sa.Double))
    op.add_column("pipeline_candidates", sa.Column("judge_error", sa.Text))
    op.add_column(
        "pipeline_judgements",
        sa.Column("judged_by", sa.String(20), nullable=False, server_default=sa.text("'person'")),
    )
    # Before this revision, only people judged candidates.
    op.execute("UPDATE pipeline_candidates SET judged_by = 'person' WHERE status <> 'active'")


def downgrade() -> None:
    op.drop_column("pipeline_judgements", "judged_by")
    for name in ("judge_error", "judge_score", "judged_by"):
        op.drop_column("pipeline_candidates", name)
    op.drop_column("pipeline_jobs", "is_judge")
