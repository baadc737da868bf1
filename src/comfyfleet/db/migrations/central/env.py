"""Alembic's door to the central history; always called with a connection."""

from alembic import context

from comfyfleet.db.central import central
from comfyfleet.db.migrating import version_table

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=central,
    version_table=version_table("central"),
)
with context.begin_transaction():
    context.run_migrations()
