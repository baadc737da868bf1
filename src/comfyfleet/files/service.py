"""What may happen to a tenant's files. Another tenant's file is not there, whoever asks.

Only rows: the bytes go by URL between whoever has them and object storage.
"""

from collections.abc import Collection
from typing import Any
from uuid import UUID

from comfyfleet.db import Database, Tx
from comfyfleet.db.statement import Call
from comfyfleet.files import store
from comfyfleet.files.model import File, checked, checked_hash
from comfyfleet.kernel.errors import Conflict, InvalidInput, NotFound, StorageFull

FILES_AT_ONCE_MAX = 1000


async def add(tx: Tx, file: File) -> File:
    """A file whose bytes are there, or one that is only announced: then its size is None."""
    await store.add(tx, checked(file))
    return file


def adding(file: File) -> Call:
    """The same, to be sent together with what else is written."""
    return store.adding(checked(file))


async def used_bytes(tx: Tx, tenant_id: UUID) -> int:
    """What the tenant stores, uploads that are only announced among it."""
    return await store.used_bytes(tx, tenant_id)


async def recount(pool: Database) -> dict[UUID, int]:
    """Corrects what is counted of tenants' storage; by tenant, how many bytes were missing.

    Older versions may have checked or removed files beside this one, and counted nothing.
    """
    async with pool.look() as tx:
        missing = await store.miscounts(tx)
    for tenant_id, size in missing.items():
        async with pool.begin() as tx:
            await store.count(tx, tenant_id, size)
    return missing


async def require_room(tx: Tx, tenant_id: UUID, size: int, *, most: int) -> None:
    """In the transaction that adds the file: nobody else of the tenant can take the same room."""
    used = await store.used_bytes(tx, tenant_id)
    if used + size > most:
        raise StorageFull(
            f"the quota of {most:,} bytes does not hold {size:,} more: {used:,} are used",
            quota_bytes=most,
            used_bytes=used,
        )


async def get(tx: Tx, tenant_id: UUID, file_id: UUID) -> File:
    found = await store.find(tx, tenant_id, [file_id])
    if not found:
        raise _missing(file_id)
    return found[0]


async def get_all(tx: Tx, tenant_id: UUID, file_ids: Collection[UUID]) -> dict[UUID, File]:
    """All of them, by id; NotFound names the first that is missing."""
    if len(file_ids) > FILES_AT_ONCE_MAX:
        raise InvalidInput(f"at most {FILES_AT_ONCE_MAX} files are looked up at once")
    found = {file.id: file for file in await store.find(tx, tenant_id, file_ids)}
    for file_id in file_ids:
        if file_id not in found:
            raise _missing(file_id)
    return found


async def those_of(tx: Tx, tenant_id: UUID, file_ids: Collection[UUID]) -> dict[UUID, File]:
    """Those that are still there, by id: a job outlives its files."""
    if len(file_ids) > FILES_AT_ONCE_MAX:
        raise InvalidInput(f"at most {FILES_AT_ONCE_MAX} files are looked up at once")
    return {file.id: file for file in await store.find(tx, tenant_id, file_ids)}


async def hold(tx: Tx, tenant_id: UUID, file_id: UUID) -> File:
    """As `get`; whoever else wants to hold it waits until the transaction ends."""
    found = await store.hold(tx, tenant_id, file_id)
    if found is None:
        raise _missing(file_id)
    return found


async def by_hash(tx: Tx, tenant_id: UUID, user_id: UUID | None, content_hash: str) -> File | None:
    """The user's oldest file with this content: the same bytes needn't be sent again.

    It can't be removed until the transaction ends, in which something may come to name it.
    """
    return await store.by_hash(tx, tenant_id, user_id, checked_hash(content_hash))


async def confirm(
    tx: Tx,
    tenant_id: UUID,
    file_id: UUID,
    *,
    size: int,
    mime_type: str | None = None,
    content_hash: str | None = None,
    path: str | None = None,
) -> File:
    """An announced file has arrived. Saying so again is fine, saying otherwise is a Conflict.

    It lies under `path` from now on, unless somebody else has said so before.
    """
    if size < 0:
        raise InvalidInput(f"a file can't have {size} bytes", field="size")
    told = {"mime_type": mime_type, "content_hash": content_hash and checked_hash(content_hash)}
    facts: dict[str, Any] = {"size": size} | {
        name: value for name, value in told.items() if value is not None
    }
    moved = {"path": path} if path else {}
    if confirmed := await store.confirm(tx, tenant_id, file_id, {**facts, **moved}):
        return confirmed
    file = await get(tx, tenant_id, file_id)
    if any(getattr(file, name) != value for name, value in facts.items()):
        raise Conflict("the file is there already, and is another one", file_id=str(file_id))
    return file


async def delete(tx: Tx, tenant_id: UUID, file_id: UUID) -> File:
    """The row goes; the caller then deletes the object, after the commit.

    In this order a crash in between costs space, not a file that somebody still counts on.
    """
    removed = await store.remove(tx, tenant_id, file_id)
    if removed is None:
        raise _missing(file_id)
    return removed


def _missing(file_id: UUID) -> NotFound:
    return NotFound(f"there is no file {file_id}", file_id=str(file_id))
