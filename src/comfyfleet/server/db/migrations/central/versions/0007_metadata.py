"""Effects say whether their results carry the prompt and workflow that made them."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "effects",
        sa.Column("keep_metadata", sa.Boolean(), server_default=sa.text("false"), nullable=False),
    )
