"""Brings a database to the newest schema, and tells whether it has it. Two histories: central, tenant."""

from pathlib import Path
from typing import Literal, TypeAlias

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from comfyfleet.db.dialect import is_sqlite
from comfyfleet.db.engine import Database
from comfyfleet.kernel.errors import Refused

History: TypeAlias = Literal["central", "tenant"]
FOLDER = Path(__file__).parent / "migrations"
# Held while a PostgreSQL schema is changed: two control planes may start at the same moment.
UPGRADE_LOCK = 0x636F6D66


async def upgrade(database: Database, history: History) -> None:
    async with database.begin() as tx:
        if not is_sqlite(tx):
            await tx.execute(text(f"SELECT pg_advisory_xact_lock({UPGRADE_LOCK})"))
        await tx.run_sync(_upgrade, history)


async def require_newest(database: Database, history: History) -> None:
    """Refuses to work on a schema that this version was not written for."""
    async with database.look() as tx:
        found = await tx.run_sync(_revision, history)
    newest = ScriptDirectory.from_config(_config(history)).get_current_head()
    if found != newest:
        raise Refused(
            f"the {history} database has schema {found or 'none'}, and this version needs {newest}",
            hint="comfyfleet db upgrade",
        )


def _upgrade(connection: Connection, history: History) -> None:
    config = _config(history)
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _revision(connection: Connection, history: History) -> str | None:
    context = MigrationContext.configure(connection, opts={"version_table": version_table(history)})
    return context.get_current_revision()


def version_table(history: History) -> str:
    """One each: on one PostgreSQL both histories may live in one database."""
    return f"comfyfleet_{history}_version"


def _config(history: History) -> Config:
    config = Config()
    config.set_main_option("script_location", str(FOLDER / history).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
