"""The only SQL about files."""

from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, bindparam, cast, delete, func, insert, select, update

from comfyfleet.db import Tx
from comfyfleet.db.dialect import is_sqlite, locked
from comfyfleet.db.statement import Call, OfSeveral, Statement
from comfyfleet.db.tenant import files
from comfyfleet.files.model import File

_ADD = Statement(lambda tx: insert(files), columns=File.__slots__)


def adding(file: File) -> Call:
    return _ADD, _row(file)


async def add(tx: Tx, file: File) -> None:
    await _ADD.tuples(tx, _row(file))


_FIND = OfSeveral(
    files.c.id,
    lambda tx, is_one: select(files).where(files.c.tenant_id == bindparam("of_tenant"), is_one),
)


async def find(tx: Tx, tenant_id: UUID, file_ids: Collection[UUID]) -> list[File]:
    if not file_ids:
        return []  # SQLite would look through all of the tenant's to find none
    return [_file(row) for row in await _FIND.of(tx, file_ids, {"of_tenant": tenant_id})]


async def hold(tx: Tx, tenant_id: UUID, file_id: UUID) -> File | None:
    query = select(files).where(files.c.tenant_id == tenant_id, files.c.id == file_id)
    row = (await tx.execute(locked(tx, query))).mappings().first()
    return None if row is None else _file(row)


async def by_hash(tx: Tx, tenant_id: UUID, user_id: UUID | None, content_hash: str) -> File | None:
    query = (
        select(files)
        .where(
            files.c.tenant_id == tenant_id,
            files.c.user_id == user_id if user_id else files.c.user_id.is_(None),
            files.c.content_hash == content_hash,
            files.c.size.is_not(None),
        )
        .order_by(files.c.created_at, files.c.id)
        .limit(1)
    )
    found = await tx.execute(locked(tx, query))
    row = found.mappings().first()
    return None if row is None else _file(row)


async def confirm(tx: Tx, tenant_id: UUID, file_id: UUID, facts: dict[str, Any]) -> File | None:
    """None: there is none, or it was confirmed before."""
    found = await tx.execute(
        update(files)
        .where(files.c.tenant_id == tenant_id, files.c.id == file_id, files.c.size.is_(None))
        .values(facts)
        .returning(files)
    )
    row = found.mappings().first()
    return None if row is None else _file(row)


async def remove(tx: Tx, tenant_id: UUID, file_id: UUID) -> File | None:
    found = await tx.execute(
        delete(files).where(files.c.tenant_id == tenant_id, files.c.id == file_id).returning(files)
    )
    row = found.mappings().first()
    return None if row is None else _file(row)


async def used_bytes(tx: Tx, tenant_id: UUID) -> int:
    """With those that are only announced. Who asks for room waits for those who ask too."""
    if not is_sqlite(tx):
        key = int.from_bytes(tenant_id.bytes[:8], signed=True)
        await tx.execute(select(func.pg_advisory_xact_lock(key)))
    mine = files.c.tenant_id == tenant_id
    stored = await tx.scalar(select(func.sum(files.c.size)).where(mine))
    announced = cast(files.c.metadata["announced_size"].as_string(), BigInteger)
    coming = await tx.scalar(select(func.sum(announced)).where(mine, files.c.size.is_(None)))
    return int(stored or 0) + int(coming or 0)


def _row(file: File) -> dict[str, Any]:
    row = {name: getattr(file, name) for name in File.__slots__}
    return row | {"metadata": dict(file.metadata)}


def _file(row: Mapping[Any, Any]) -> File:
    return File(**row)
