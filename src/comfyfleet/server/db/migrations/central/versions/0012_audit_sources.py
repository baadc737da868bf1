"""Adds the source of an audit entry in a tenant's database, so that it is copied only once."""

import sqlalchemy as sa
from alembic import op

revision = "audit_sources_1"
down_revision = "payments_1"
branch_labels = None
depends_on = None

IS_COPY = sa.text("source IS NOT NULL")


def upgrade() -> None:
    op.add_column("audit_log", sa.Column("source", sa.String(200)))
    op.create_index(
        "audit_log_source",
        "audit_log",
        ["source"],
        unique=True,
        sqlite_where=IS_COPY,
        postgresql_where=IS_COPY,
    )


def downgrade() -> None:
    op.drop_index("audit_log_source", "audit_log")
    op.drop_column("audit_log", "source")
