"""Alembic's door to the tenant history; always called with a connection."""

from alembic import context

from comfyfleet.db.migrating import version_table
from comfyfleet.db.tenant import tenant

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=tenant,
    version_table=version_table("tenant"),
)
with context.begin_transaction():
    context.run_migrations()
