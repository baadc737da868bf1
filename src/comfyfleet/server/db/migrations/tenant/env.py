"""Alembic's entry point for migrations of tenant pools. It always gets a connection."""

from alembic import context

from comfyfleet.server.db.schema import version_table
from comfyfleet.server.db.tenant_tables import tenant_metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=tenant_metadata,
    version_table=version_table("tenant"),
)
with context.begin_transaction():
    context.run_migrations()
