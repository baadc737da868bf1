"""The histories lead to exactly the tables that the code works with."""

from typing import Any

import pytest
from sqlalchemy import MetaData, text
from tests.dbkit.databases import Databases
from tests.dbkit.postgres import create_database

from comfyfleet.db import Database, Tx, open_database
from comfyfleet.db.central import central
from comfyfleet.db.migrating import History
from comfyfleet.db.tenant import tenant

METADATA: dict[History, MetaData] = {"central": central, "tenant": tenant}
SQLITE = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"
COLUMNS = """
    SELECT table_name || '.' || column_name, concat_ws(' ', data_type, character_maximum_length,
        is_nullable, column_default, is_identity)
    FROM information_schema.columns WHERE table_schema = 'public'"""
INDEXES = "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'"
CONSTRAINTS = """
    SELECT conrelid::regclass || '.' || conname, pg_get_constraintdef(oid) FROM pg_constraint
    WHERE connamespace = 'public'::regnamespace"""
OPTIONS = """
    SELECT relname, array_to_string(reloptions, ',') FROM pg_class
    WHERE relnamespace = 'public'::regnamespace AND reloptions IS NOT NULL"""
TRIGGERS = "SELECT tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal"


async def schema(tx: Tx) -> dict[str, Any]:
    """Everything by name, but for Alembic's own table; SQLite keeps the words, less the spaces."""
    is_sqlite = tx.dialect.name == "sqlite"
    queries = [SQLITE] if is_sqlite else [COLUMNS, INDEXES, CONSTRAINTS, OPTIONS, TRIGGERS]
    found = [row for query in queries for row in await tx.execute(text(query))]
    return {
        name: " ".join(sorted(str(definition).replace(",", " ").split()))
        for name, definition in found
        if "_version" not in name.removeprefix("workflow_versions")
    }


async def made_at_once(databases: Databases, history: History) -> Database:
    if databases.server_url:
        url = await create_database(databases.server_url)
    else:
        url = f"sqlite:///{databases.folder / f'{history}-at-once.sqlite3'}"
    database = open_database(url)
    async with database.begin() as tx:
        await tx.run_sync(METADATA[history].create_all)
    return database


@pytest.mark.parametrize("history", ["central", "tenant"])
async def test_a_migrated_schema_is_that_of_the_code(
    databases: Databases, history: History
) -> None:
    migrated, at_once = await databases.open(history), await made_at_once(databases, history)
    async with migrated.look() as tx:
        found = await schema(tx)
    async with at_once.look() as tx:
        wanted = await schema(tx)
    assert found == wanted
    assert len(wanted) > 5
    await migrated.close()
    await at_once.close()
