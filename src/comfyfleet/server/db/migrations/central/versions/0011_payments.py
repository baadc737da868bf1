"""Adds payments by the provider's id, so that a payment is credited once in all tenant databases.

Earlier payments are copied from the audit log, because the central database can't read the ledgers.
Each ledger still refuses a second credit of its own payments, however old they are.
"""

from typing import Any
from uuid import UUID

import sqlalchemy as sa
from alembic import op

from comfyfleet.server.db.dialect import Json, Moment, insert_if_new

revision = "payments_1"
down_revision = "starts_within_1"
branch_labels = None
depends_on = None

ROWS_AT_ONCE = 1000


def upgrade() -> None:
    payments = op.create_table(
        "payments",
        sa.Column("provider_transaction_id", sa.String(200), primary_key=True),
        sa.Column("tenant_id", sa.Uuid, nullable=False),
        sa.Column("user_id", sa.Uuid, nullable=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("created_at", Moment, nullable=False),
    )
    audit_log = sa.table(
        "audit_log",
        sa.column("id", sa.BigInteger),
        sa.column("at", Moment),
        sa.column("action", sa.String),
        sa.column("subject", sa.String),
        sa.column("tenant_id", sa.Uuid),
        sa.column("details", Json),
    )
    connection = op.get_bind()
    last_id = 0
    while True:
        query = sa.select(audit_log).where(audit_log.c.action == "credit", audit_log.c.id > last_id)
        entries = connection.execute(query.order_by(audit_log.c.id).limit(ROWS_AT_ONCE)).all()
        if not entries:
            return
        last_id = entries[-1].id
        # Rows are inserted one by one. If two tenants were credited for a payment, the first one is
        # recorded.
        for entry in entries:
            connection.execute(insert_if_new(connection, payments, [_payment(entry)]))


def _payment(entry: Any) -> dict[str, Any]:
    return {
        "provider_transaction_id": entry.subject.partition("/")[2],
        "tenant_id": entry.tenant_id,
        "user_id": UUID(entry.details["user_id"]),
        "amount": entry.details["amount"],
        "created_at": entry.at,
    }


def downgrade() -> None:
    op.drop_table("payments")
