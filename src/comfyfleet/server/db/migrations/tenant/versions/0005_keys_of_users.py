"""Idempotency keys are a user's own, and a user's active jobs are counted by an index."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

OF_NOBODY = "user_id IS NULL"
ACTIVE = "status IN ('queued', 'processing')"


def upgrade() -> None:
    _keys_of_jobs()
    _keys_of_batches()
    op.create_index(
        "ai_jobs_active_of_user",
        "ai_jobs",
        ["tenant_id", "user_id"],
        unique=False,
        postgresql_where=sa.text(ACTIVE),
        sqlite_where=sa.text(ACTIVE),
    )


def _keys_of_jobs() -> None:
    with op.batch_alter_table("ai_jobs") as jobs:
        jobs.drop_constraint("ai_jobs_tenant_id_idempotency_key_unique", type_="unique")
    op.create_index(
        "ai_jobs_key", "ai_jobs", ["tenant_id", "user_id", "idempotency_key"], unique=True
    )
    # Two rows of nobody would both be let in: to an index, no user is unlike another.
    op.create_index(
        "ai_jobs_key_of_nobody",
        "ai_jobs",
        ["tenant_id", "idempotency_key"],
        unique=True,
        postgresql_where=sa.text(OF_NOBODY),
        sqlite_where=sa.text(OF_NOBODY),
    )


def _keys_of_batches() -> None:
    with op.batch_alter_table("batches") as batches:
        batches.drop_constraint("batches_tenant_id_idempotency_key_unique", type_="unique")
        batches.create_unique_constraint(
            "batches_tenant_id_user_id_idempotency_key_unique",
            ["tenant_id", "user_id", "idempotency_key"],
        )
