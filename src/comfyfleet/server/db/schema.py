"""Upgrades databases to the newest schema, and checks their schema. The central database and the
tenant pools have separate migration histories.
"""

from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Column, Connection, MetaData, Select, String, Table, select, text

from comfyfleet.errors import Refused
from comfyfleet.server.db.database import Database
from comfyfleet.server.db.dialect import is_sqlite

History: TypeAlias = Literal["central", "tenant"]
MIGRATIONS_FOLDER = Path(__file__).parent / "migrations"
# The advisory lock for changes of a PostgreSQL schema, because two control planes may start
# concurrently.
UPGRADE_LOCK = 0x636F6D66


async def upgrade_schema(database: Database, history: History) -> None:
    """Upgrades to the newest schema. Raises Refused if this version doesn't know the database's
    revision.
    """
    async with database.transaction() as tx:
        if not is_sqlite(tx):
            await tx.execute(text(f"SELECT pg_advisory_xact_lock({UPGRADE_LOCK})"))
        await tx.run_sync(_upgrade, history)


async def require_newest_schema(database: Database, history: History) -> None:
    """Raises Refused unless the database has the newest schema."""
    revision, needed = await schema_revision(database, history), newest_revision(history)
    _require_known(revision, history)
    if revision != needed:
        raise Refused(
            f"the {history} database has schema {revision or 'none'}; "
            f"this version requires {needed}",
            hint="comfyfleet db upgrade",
        )


async def schema_revision(database: Database, history: History) -> str | None:
    """Returns the revision of a database, or None if the database is empty."""
    async with database.read() as tx:
        return await tx.run_sync(_revision, history)


def newest_revision(history: History) -> str:
    return _revisions(history)[0]


@cache
def _revisions(history: History) -> tuple[str, ...]:
    """Returns the revisions, newest first. They are cached, because readiness checks need them
    every few seconds.
    """
    scripts = ScriptDirectory.from_config(_config(history)).walk_revisions()
    return tuple(script.revision for script in scripts)


def _require_known(revision: str | None, history: History) -> None:
    if revision is not None and revision not in _revisions(history):
        raise Refused(
            f"the {history} database was created by another version of comfyfleet; "
            f"this version doesn't know its schema {revision}",
            hint="Run the version that created it, or start with an empty database",
        )


def _upgrade(connection: Connection, history: History) -> None:
    _require_known(_revision(connection, history), history)
    config = _config(history)
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _revision(connection: Connection, history: History) -> str | None:
    """Reads the revision. Alembic's own function isn't used, because it creates a new table object
    for each call, and readiness checks would fill SQLAlchemy's statement cache with them.
    """
    if not connection.dialect.has_table(connection, version_table(history)):
        return None
    revision: str | None = connection.execute(_select_revision(history)).scalar()
    return revision


@cache
def _select_revision(history: History) -> Select[str]:
    table = Table(version_table(history), MetaData(), Column("version_num", String(32)))
    return select(table.c.version_num)


def version_table(history: History) -> str:
    """Returns the name of the version table. Each history has its own table, because both may be in
    the same database.
    """
    return f"comfyfleet_{history}_version"


def _config(history: History) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS_FOLDER / history).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
