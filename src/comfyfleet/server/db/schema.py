"""Upgrades a database to the newest schema, and checks that it has it. Two histories: central and tenant."""

from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from comfyfleet.errors import Refused
from comfyfleet.server.db.database import Database
from comfyfleet.server.db.dialect import is_sqlite

History: TypeAlias = Literal["central", "tenant"]
MIGRATIONS_FOLDER = Path(__file__).parent / "migrations"
# Held while a PostgreSQL schema is changed: two control planes may start at the same moment.
UPGRADE_LOCK = 0x636F6D66


async def upgrade_schema(database: Database, history: History) -> None:
    async with database.transaction() as tx:
        if not is_sqlite(tx):
            await tx.execute(text(f"SELECT pg_advisory_xact_lock({UPGRADE_LOCK})"))
        await tx.run_sync(_upgrade, history)


async def require_newest_schema(database: Database, history: History) -> None:
    """Refuses to work on a schema that this version was not written for."""
    found, needed = await schema_revision(database, history), newest_revision(history)
    if found != needed:
        raise Refused(
            f"the {history} database has schema {found or 'none'}, and this version needs {needed}",
            hint="comfyfleet db upgrade",
        )


async def schema_revision(database: Database, history: History) -> str | None:
    """None of a database that is still empty."""
    async with database.read() as tx:
        return await tx.run_sync(_revision, history)


@cache
def newest_revision(history: History) -> str:
    """Read once: a control plane is asked every few seconds whether it is ready."""
    found = ScriptDirectory.from_config(_config(history)).get_current_head()
    if found is None:
        raise LookupError(f"no migrations of {history} are installed")
    return found


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
    config.set_main_option("script_location", str(MIGRATIONS_FOLDER / history).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
