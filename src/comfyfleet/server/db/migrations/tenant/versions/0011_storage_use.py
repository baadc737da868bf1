"""What the checked files of a tenant have is counted in a row, no longer added up for each upload."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "storage_use",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("storage_use_pkey")),
    )
    op.execute(
        """INSERT INTO storage_use (tenant_id, bytes) SELECT tenant_id, sum(size) FROM files
        WHERE checked_at IS NOT NULL AND size IS NOT NULL GROUP BY tenant_id"""
    )
    op.drop_index("files_use", "files")
    where = sa.text("checked_at IS NULL")
    op.create_index(
        "files_unchecked_of_tenant",
        "files",
        ["tenant_id"],
        postgresql_where=where,
        sqlite_where=where,
    )
