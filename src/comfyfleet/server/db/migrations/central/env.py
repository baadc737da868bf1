"""Alembic's entry point for migrations of the central database. It always gets a connection."""

from alembic import context

from comfyfleet.server.db.central_tables import central_metadata
from comfyfleet.server.db.schema import version_table

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=central_metadata,
    version_table=version_table("central"),
)
with context.begin_transaction():
    context.run_migrations()
