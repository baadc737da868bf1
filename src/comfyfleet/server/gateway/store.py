"""SQL for the files that editors store for their users. All queries filter by tenant and user."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, update

from comfyfleet.server.db import Tx
from comfyfleet.server.db.dialect import for_update, insert_if_new, upsert
from comfyfleet.server.db.tenant_tables import gateway_userdata as userdata
from comfyfleet.server.gateway.model import StoredUserdata, UserdataEntry

_ENTRY = (userdata.c.path, userdata.c.size, userdata.c.created_at, userdata.c.modified_at)


def _of_user(tenant_id: UUID, user_id: UUID) -> ColumnElement[bool]:
    return and_(userdata.c.tenant_id == tenant_id, userdata.c.user_id == user_id)


def _under(folder: str) -> ColumnElement[bool]:
    """Returns the condition for paths in a folder and its subfolders.

    LIKE can't be used because it ignores case on SQLite. A range can't be used because it depends
    on the collation on PostgreSQL.
    """
    prefix = f"{folder}/" if folder else ""
    return func.substr(userdata.c.path, 1, len(prefix)) == prefix


async def get(tx: Tx, tenant_id: UUID, user_id: UUID, path: str) -> StoredUserdata | None:
    query = select(*_ENTRY, userdata.c.data).where(
        _of_user(tenant_id, user_id), userdata.c.path == path
    )
    row = (await tx.execute(query)).first()
    return None if row is None else StoredUserdata(UserdataEntry(*row[:4]), row.data)


async def get_locked(tx: Tx, tenant_id: UUID, user_id: UUID, path: str) -> bytes | None:
    query = select(userdata.c.data).where(_of_user(tenant_id, user_id), userdata.c.path == path)
    data: bytes | None = (await tx.execute(for_update(tx, query))).scalar()
    return data


async def list_under(
    tx: Tx, tenant_id: UUID, user_id: UUID, folder: str, *, limit: int
) -> list[UserdataEntry]:
    query = select(*_ENTRY).where(_of_user(tenant_id, user_id), _under(folder)).limit(limit)
    return [UserdataEntry(*row) for row in await tx.execute(query)]


async def is_blocked(tx: Tx, tenant_id: UUID, user_id: UUID, path: str) -> bool:
    """Checks whether the path is a folder, or one of its parent folders is a file."""
    parts = path.split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts))]
    query = (
        select(userdata.c.path)
        .where(_of_user(tenant_id, user_id), or_(userdata.c.path.in_(above), _under(path)))
        .limit(1)
    )
    return (await tx.execute(query)).first() is not None


async def use_of_others(tx: Tx, tenant_id: UUID, user_id: UUID, *, than: str) -> tuple[int, int]:
    """Returns the number and the total size in bytes of the user's files, except for the file
    `than`."""
    query = select(func.count(), func.coalesce(func.sum(userdata.c.size), 0)).where(
        _of_user(tenant_id, user_id), userdata.c.path != than
    )
    files, size = (await tx.execute(query)).one()
    return int(files), int(size)


async def add(tx: Tx, row: Mapping[str, Any]) -> bool:
    """Adds a file. Returns False if a file with this path already exists."""
    statement = insert_if_new(tx, userdata, [row]).returning(userdata.c.path)
    return (await tx.execute(statement)).first() is not None


async def put(tx: Tx, row: Mapping[str, Any]) -> None:
    """Adds a file, or replaces the file with this path. A replaced file keeps its creation time."""
    changed = {name: row[name] for name in ("data", "size", "modified_at")}
    replaced = await tx.execute(
        update(userdata)
        .where(_of_user(row["tenant_id"], row["user_id"]), userdata.c.path == row["path"])
        .values(changed)
        .returning(userdata.c.path)
    )
    if replaced.first() is None:
        await tx.execute(upsert(tx, userdata, row, key=("tenant_id", "user_id", "path")))


async def remove(tx: Tx, tenant_id: UUID, user_id: UUID, path: str) -> bool:
    deleted = await tx.execute(
        delete(userdata)
        .where(_of_user(tenant_id, user_id), userdata.c.path == path)
        .returning(userdata.c.path)
    )
    return deleted.first() is not None
