"""No id of the outbox is given twice, on SQLite either: rows are deleted by id a moment after they were
delivered, and a new row that had got the same id by then was deleted with them."""

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_bind().dialect.name != "sqlite":
        return
    with op.batch_alter_table(
        "outbox", recreate="always", table_kwargs={"sqlite_autoincrement": True}
    ):
        pass
