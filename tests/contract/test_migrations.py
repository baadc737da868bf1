"""The histories lead to exactly the tables that the code works with."""

from typing import Any
from uuid import UUID

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, MetaData, column, insert, select, table, text, update
from tests.support.databases.factory import Databases
from tests.support.databases.postgres import create_database

from comfyfleet.clock import utc_now
from comfyfleet.errors import Refused
from comfyfleet.server.db import Database, Tx, open_database
from comfyfleet.server.db.central_tables import audit_log, central_metadata, payments
from comfyfleet.server.db.schema import (
    MIGRATIONS_FOLDER,
    History,
    require_newest_schema,
    upgrade_schema,
    version_table,
)
from comfyfleet.server.db.tenant_tables import tenant_metadata

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


async def test_the_schema_is_checked_by_the_same_statements_each_time(databases: Databases) -> None:
    """Readiness is checked every few seconds, and each new statement would stay in the cache."""
    database = await databases.open("central")
    await require_newest_schema(database, "central")
    # All databases of the tests share this cache.
    cache = database.engine.sync_engine.get_execution_options()["compiled_cache"]
    before = len(cache)
    assert before > 0
    for _ in range(3):
        await require_newest_schema(database, "central")
    assert len(cache) == before
    await database.close()


@pytest.mark.parametrize("history", ["central", "tenant"])
async def test_the_newest_migration_can_be_taken_back_and_made_again(
    databases: Databases, history: History
) -> None:
    database = await databases.open(history)
    async with database.transaction() as tx:
        before = await schema(tx)
        await tx.run_sync(to_revision, history, "-1")
        assert await schema(tx) != before
        await tx.run_sync(to_revision, history, "head")
        assert await schema(tx) == before
    await database.close()


@pytest.mark.parametrize("history", ["central", "tenant"])
async def test_a_database_of_another_version_is_refused(
    databases: Databases, history: History
) -> None:
    database = await databases.open(history)
    async with database.transaction() as tx:
        before = await schema(tx)
        versions = table(version_table(history), column("version_num"))
        await tx.execute(update(versions).values(version_num="0099"))
    for refused_by in (upgrade_schema, require_newest_schema):
        with pytest.raises(Refused, match=f"the {history} database was created by another version"):
            await refused_by(database, history)
    async with database.read() as tx:
        assert await schema(tx) == before
    await database.close()


OLD_ID = "11111111111111111111111111111111"
OLD_JOB = f"""
    INSERT INTO ai_jobs (id, tenant_id, workflow_id, workflow_slug, workflow_version, stage, provider,
        priority, status, prompt, properties, assets, submitted_at)
    VALUES ('{OLD_ID}', '{OLD_ID}', 1, 'w', 1, 'production', 'self_hosted', 0, 'processing', '{{}}', '{{}}',
        '[]', '2026-01-01 00:00:00+00')"""  # noqa: S608
OLD_EVENTS = f"""
    INSERT INTO run_events (tenant_id, user_id, job_id, lease_number, prompt_id, events, record, created_at)
    VALUES ('{OLD_ID}', '{OLD_ID}', '{OLD_ID}', 1, 'p', '[["execution_start", {{}}]]', RECORD,
        '2026-01-01 00:00:00+00')"""  # noqa: S608


async def test_repeated_records_of_older_versions_are_reduced_to_the_newest(
    databases: Databases,
) -> None:
    database = await databases.open("tenant")
    async with database.transaction() as tx:
        await tx.run_sync(to_revision, "tenant", "judges_1")
        await tx.execute(text(OLD_JOB))
        for record in ("NULL", "NULL", "'{\"a\": 1}'", "'{\"a\": 2}'"):
            await tx.execute(text(OLD_EVENTS.replace("RECORD", record)))
        await tx.run_sync(to_revision, "tenant", "head")
        query = "SELECT CAST(record AS text), has_start FROM run_events ORDER BY id"
        rows = [tuple(row) for row in await tx.execute(text(query))]
    assert [record for record, _ in rows] == [None, None, None, '{"a": 2}']
    assert [bool(has_start) for _, has_start in rows] == [True, False, False, False]
    await database.close()


OTHER_ID = "22222222222222222222222222222222"


async def test_payments_of_older_versions_count_once_in_all_tenants(databases: Databases) -> None:
    database = await databases.open("central")
    async with database.transaction() as tx:
        await tx.run_sync(to_revision, "central", "starts_within_1")
        for tenant_id, payment_id, amount in (
            (OLD_ID, "pi/1", 5),
            (OTHER_ID, "pi/1", 7),
            (OTHER_ID, "pi_2", 9),
        ):
            values = {
                "at": utc_now(),
                "actor": "ada",
                "action": "credit",
                "subject": f"payment:{UUID(tenant_id)}/{payment_id}",
                "tenant_id": UUID(tenant_id),
                "details": {"user_id": str(UUID(tenant_id)), "amount": amount},
            }
            await tx.execute(insert(audit_log).values(values))
        await tx.run_sync(to_revision, "central", "head")
        found = await tx.execute(select(payments).order_by(payments.c.amount))
        rows = [(row.provider_transaction_id, row.tenant_id, row.amount) for row in found]
    assert rows == [("pi/1", UUID(OLD_ID), 5), ("pi_2", UUID(OTHER_ID), 9)]
    await database.close()


def to_revision(connection: Connection, history: History, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS_FOLDER / history))
    config.attributes["connection"] = connection
    move = command.upgrade if revision == "head" else command.downgrade
    move(config, revision)
