"""The only SQL about files."""

from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    bindparam,
    cast,
    delete,
    func,
    insert,
    select,
    text,
    union_all,
    update,
)

from comfyfleet.db import Tx
from comfyfleet.db.dialect import is_sqlite, locked, upsert_sum
from comfyfleet.db.statement import Call, OfSeveral, Statement
from comfyfleet.db.tenant import files, storage_use
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
    if row is None:
        return None
    if row["checked_at"] is not None:
        await count(tx, tenant_id, -row["size"])
    return _file(row)


async def used_bytes(tx: Tx, tenant_id: UUID) -> int:
    """With those that are only announced. Who asks for room waits for those who ask too.

    Checked files are counted in a row of the tenant's, in the transaction that notes or removes them;
    the others are added up. One statement reads both, so that none is missed or counted twice.
    """
    if not is_sqlite(tx):
        key = int.from_bytes(tenant_id.bytes[:8], signed=True)
        await tx.execute(select(func.pg_advisory_xact_lock(key)))
    announced = cast(files.c.metadata["announced_size"].as_string(), BigInteger)
    unchecked = select(func.sum(func.coalesce(files.c.size, announced))).where(
        files.c.tenant_id == tenant_id, text("files.checked_at IS NULL")
    )
    counted = select(storage_use.c.bytes).where(storage_use.c.tenant_id == tenant_id)
    parts = (await tx.execute(select(counted.scalar_subquery(), unchecked.scalar_subquery()))).one()
    return sum(int(each or 0) for each in parts)


async def count(tx: Tx, tenant_id: UUID, size: int) -> None:
    """So many bytes of checked files more, or less. Whoever else counts waits until the commit."""
    row = {"tenant_id": tenant_id, "bytes": size}
    await tx.execute(upsert_sum(tx, storage_use, row, key=["tenant_id"]))


async def miscounts(tx: Tx) -> dict[UUID, int]:
    """By tenant, how many bytes more its checked files have than are counted."""
    has = (
        select(files.c.tenant_id, func.sum(files.c.size).label("bytes"))
        .where(files.c.checked_at.is_not(None))
        .group_by(files.c.tenant_id)
    )
    both = union_all(has, select(storage_use.c.tenant_id, -storage_use.c.bytes)).subquery()
    more = func.sum(both.c.bytes)
    query = select(both.c.tenant_id, more).group_by(both.c.tenant_id).having(more != 0)
    return {tenant_id: int(size) for tenant_id, size in await tx.execute(query)}


def _row(file: File) -> dict[str, Any]:
    row = {name: getattr(file, name) for name in File.__slots__}
    return row | {"metadata": dict(file.metadata)}


def _file(row: Mapping[Any, Any]) -> File:
    return File(**row)
