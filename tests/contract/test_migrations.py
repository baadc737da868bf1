"""The histories lead to exactly the tables that the code works with."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, MetaData, insert, select, text
from tests.dbkit.databases import Databases
from tests.dbkit.postgres import create_database

from comfyfleet.server.db import Database, Tx, open_database
from comfyfleet.server.db.central_tables import central_metadata
from comfyfleet.server.db.dialect import insert_if_new
from comfyfleet.server.db.schema import MIGRATIONS_FOLDER, History, upgrade_schema
from comfyfleet.server.db.tenant_tables import ai_jobs, files, tenant_metadata
from comfyfleet.server.media.service import recount, used_bytes

TENANT = UUID("7c1f8f1e-4a52-4c8e-8f0a-0d9b1f2f3a41")
METADATA: dict[History, MetaData] = {"central": central_metadata, "tenant": tenant_metadata}
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
    """Everything by name, but for Alembic's own table; SQLite keeps the words, less the spaces. Of a
    table that was made anew it puts the name into quotes, and defaults into brackets."""
    is_sqlite = tx.dialect.name == "sqlite"
    queries = [SQLITE] if is_sqlite else [COLUMNS, INDEXES, CONSTRAINTS, OPTIONS, TRIGGERS]
    found = [row for query in queries for row in await tx.execute(text(query))]
    return {
        name: " ".join(
            sorted(
                str(definition)
                .replace(",", " ")
                .replace('"', "")
                .replace("(false)", "false")
                .split()
            )
        )
        for name, definition in found
        if "_version" not in name.removeprefix("workflow_versions")
    }


async def made_at_once(databases: Databases, history: History) -> Database:
    if databases.server_url:
        url = await create_database(databases.server_url)
    else:
        url = f"sqlite:///{databases.folder / f'{history}-at-once.sqlite3'}"
    database = open_database(url)
    async with database.transaction() as tx:
        await tx.run_sync(METADATA[history].create_all)
    return database


@pytest.mark.parametrize("history", ["central", "tenant"])
async def test_a_migrated_schema_is_that_of_the_code(
    databases: Databases, history: History
) -> None:
    migrated, at_once = await databases.open(history), await made_at_once(databases, history)
    async with migrated.read() as tx:
        found = await schema(tx)
    async with at_once.read() as tx:
        wanted = await schema(tx)
    assert found == wanted
    assert len(wanted) > 5
    await migrated.close()
    await at_once.close()


async def test_jobs_keep_their_rows_when_keys_become_their_users(
    databases: Databases, tmp_path: Path
) -> None:
    """What an older version had written is there after the upgrade, and guarded as it is now."""
    if databases.server_url:
        url = await create_database(databases.server_url)
    else:
        url = f"sqlite:///{tmp_path / 'old.sqlite3'}"
    database = open_database(url)
    first, second, nobody = (an_old_job(user_id) for user_id in (uuid4(), uuid4(), None))
    async with database.transaction() as tx:
        await tx.run_sync(at_revision, "0004")
        await tx.execute(insert(ai_jobs), [first, nobody | {"idempotency_key": "other"}])
    await upgrade_schema(database, "tenant")
    async with database.transaction() as tx:
        kept = (await tx.execute(select(ai_jobs).where(ai_jobs.c.id == first["id"]))).one()
        assert {name: kept._mapping[name] for name in first} == first
        for row, is_new in ((first, False), (second, True), (nobody, True), (nobody, False)):
            again = insert_if_new(tx, ai_jobs, [{**row, "id": uuid4()}]).returning(ai_jobs.c.id)
            assert ((await tx.execute(again)).first() is not None) == is_new
    await database.close()


async def test_what_tenants_store_is_counted_when_the_count_comes(
    databases: Databases, tmp_path: Path
) -> None:
    if databases.server_url:
        url = await create_database(databases.server_url)
    else:
        url = f"sqlite:///{tmp_path / 'old.sqlite3'}"
    database = open_database(url)
    moment = datetime(2026, 11, 1, tzinfo=UTC)
    file = {"tenant_id": TENANT, "disk": "local", "filename": "a", "mime_type": "image/png"}
    sizes = [(100, moment), (200, moment), (400, None), (None, None)]
    rows = [
        {**file, "id": uuid4(), "path": str(number), "size": size, "metadata": {}}
        | {"created_at": moment, "checked_at": checked_at}
        for number, (size, checked_at) in enumerate(sizes)
    ]
    async with database.transaction() as tx:
        await tx.run_sync(at_revision, "0010")
        await tx.execute(insert(files), rows)
    await upgrade_schema(database, "tenant")
    async with database.transaction() as tx:
        assert await used_bytes(tx, TENANT) == 700
    assert await recount(database) == {}
    await database.close()


def at_revision(connection: Connection, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS_FOLDER / "tenant"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def an_old_job(user_id: UUID | None) -> dict[str, Any]:
    return {
        "id": uuid4(),
        "tenant_id": TENANT,
        "user_id": user_id,
        "workflow_id": 1,
        "workflow_slug": "negative",
        "workflow_version": 1,
        "stage": "production",
        "provider": "self_hosted",
        "priority": 0,
        "status": "queued",
        "prompt": {"2": {"b": 1, "a": [None, "ä"]}},
        "properties": {"width": 256},
        "assets": [],
        "submitted_at": datetime(2026, 11, 1, tzinfo=UTC),
        "idempotency_key": "once",
    }
