"""Creates millions of ended jobs. The database itself copies the rows of one real job."""
# ruff: noqa: S608 - all names and values are our own

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Table

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db import Database
from comfyfleet.server.db.central_tables import audit_log, dispatches
from comfyfleet.server.db.dialect import Moment
from comfyfleet.server.db.tenant_tables import (
    ai_jobs,
    files,
    job_attempts,
    job_events,
    token_transactions,
    videos,
)

FAILED, CANCELLED = 20, 21  # one job in so many
ENDED = f"""CASE WHEN n % {FAILED} = 0 THEN 'failed' WHEN n % {CANCELLED} = 0 THEN 'cancelled'
    ELSE 'completed' END"""
# Like random ids: rows that are close in time are not close in the index. The salt differs by table.
SPREAD = "(n * 2654435761 + {salt}) % 4294967296"
JOB, FILE, MEDIA, LEASE = 1, 2, 3, 4
# By whether it is SQLite. Those that a constraint has made stay.
INDEXES = {
    True: "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL",
    False: """SELECT indexname AS name, indexdef AS sql FROM pg_indexes WHERE schemaname = 'public'
        AND indexname NOT IN (SELECT conname FROM pg_constraint)""",
}
CACHE, WIDE = "PRAGMA cache_size", -1_500_000  # KiB


@dataclass(frozen=True)
class Copier:
    """The SQL of one kind of database that creates copies 1 to `count`."""

    is_sqlite: bool
    count: int

    def id(self, salt: int) -> str:
        spread = SPREAD.format(salt=salt)
        if self.is_sqlite:
            return f"printf('%08x%024x', {spread}, n * 10 + {salt})"
        head, tail = f"to_hex({spread})", f"to_hex(n * 10 + {salt})"
        return f"(lpad({head}, 8, '0') || lpad({tail}, 24, '0'))::uuid"

    def earlier(self, column: str) -> str:
        """The time of each copy: one second apart, the last one is the newest."""
        seconds = f"({self.count + 1} - n)"
        if self.is_sqlite:
            return f"{column} - {seconds} * 1000000"
        return f"{column} - {seconds} * interval '1 second'"

    def statement(self, table: Table, where: str, changed: Mapping[str, str]) -> str:
        names = [
            each.name
            for each in table.c
            if each.name in changed or not _is_numbered(table, each.name)
        ]
        moments = {each.name for each in table.c if isinstance(each.type, Moment)}
        values = [
            changed.get(name) or (self.earlier(name) if name in moments else f'"{name}"')
            for name in names
        ]
        columns = ", ".join(f'"{name}"' for name in names)
        return f"""
            INSERT INTO {table.name} ({columns})
            WITH RECURSIVE series(n) AS (
                SELECT 1 UNION ALL SELECT n + 1 FROM series WHERE n < {self.count})
            SELECT {", ".join(values)}
            FROM series CROSS JOIN (SELECT * FROM {table.name} WHERE {where}) AS each ORDER BY n"""

    def literal(self, value: UUID) -> str:
        return f"'{value.hex}'" if self.is_sqlite else f"'{value}'"

    def of_pool(self, job_id: UUID) -> Iterator[str]:
        job, file, media, lease = map(self.id, (JOB, FILE, MEDIA, LEASE))
        mine = f"job_id = {self.literal(job_id)}"
        yield self.statement(
            ai_jobs,
            f"id = {self.literal(job_id)}",
            {
                "id": job,
                "status": ENDED,
                "lease_token": lease,
                "idempotency_key": "'copy-' || n",
                "output_file_id": file,
                "video_id": media,
            },
        )
        output = f"id = (SELECT output_file_id FROM ai_jobs WHERE id = {self.literal(job_id)})"
        checked = {"checked_at": self.earlier("created_at")}
        yield self.statement(files, output, {"id": file, "path": "path || '-' || n", **checked})
        yield "DELETE FROM storage_use"
        yield """INSERT INTO storage_use SELECT tenant_id, sum(size) FROM files
            WHERE checked_at IS NOT NULL GROUP BY tenant_id"""
        yield self.statement(
            videos,
            mine,
            {"id": media, "job_id": job, "original_file_id": file, "processed_file_id": file},
        )
        for table in (job_attempts, job_events, token_transactions):
            yield self.statement(table, mine, {"job_id": job})

    def of_central(self, job_id: UUID) -> Iterator[str]:
        changed = {"tenant_job_id": self.id(JOB), "status": ENDED, "lease_token": self.id(LEASE)}
        its = f"tenant_job_id = {self.literal(job_id)}"
        first = f"(SELECT id FROM ai_job_dispatches WHERE {its})"
        yield self.statement(dispatches, its, changed)
        noted = f"subject = 'dispatch:' || {first}"
        yield self.statement(audit_log, noted, {"subject": f"'dispatch:' || ({first} + n)"})


def _is_numbered(table: Table, name: str) -> bool:
    """Whether the database numbers the rows of this table."""
    return name == "id" and table in (dispatches, audit_log, job_events, token_transactions)


async def copy_job(plane: ControlPlane, job_id: UUID, count: int) -> None:
    """Makes this many copies of an ended job, for the same user."""
    pool = plane.pools["main"]
    copier = Copier(pool.is_sqlite, count)
    await _copy_without_indexes(pool, copier.of_pool(job_id))
    await _copy_without_indexes(plane.central, copier.of_central(job_id))


async def _copy_without_indexes(database: Database, statements: Iterator[str]) -> None:
    """Drops and rebuilds the indexes around the copying: row by row, a million takes half an hour."""
    async with database.transaction() as tx:
        found = (await tx.exec_driver_sql(INDEXES[database.is_sqlite])).mappings().all()
        drops = [f"DROP INDEX {each['name']}" for each in found]
        makes = [each["sql"] for each in found]
        kept = (await tx.exec_driver_sql(CACHE)).scalar() if database.is_sqlite else None
        wide, as_before = [f"{CACHE} = {WIDE}"], [f"{CACHE} = {kept}"]
        if kept is None:
            wide = as_before = []
        for statement in (*wide, *drops, *statements, *makes, *as_before):
            await tx.exec_driver_sql(statement)
    if not database.is_sqlite:
        async with database.transaction() as tx:
            await tx.exec_driver_sql("ANALYZE")  # as autovacuum does
