"""Stores an editor's data per user: settings, and files such as workflows."""

import json
from collections.abc import Mapping
from typing import Any

from comfyfleet.api.sizes import is_larger
from comfyfleet.api.values import is_storable
from comfyfleet.errors import Conflict, InvalidInput, LimitExceeded, NotFound, StorageFull
from comfyfleet.protocol.files import path_inside
from comfyfleet.protocol.http import json_text
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db import Tx
from comfyfleet.server.gateway import store
from comfyfleet.server.gateway.model import StoredUserdata, UserdataEntry
from comfyfleet.server.tenants.model import Caller

SETTINGS = "comfy.settings.json"
PATH_CHARACTERS_MAX = 500
FILE_BYTES_MAX = 20 * 1024**2
# A folder is listed with all of its files.
PATH_FOLDERS_MAX = 20
# Limited because all settings are read and written for each change.
SETTINGS_BYTES_MAX = 512 * 1024
FILES_MAX = 5_000
BYTES_MAX = 512 * 1024**2


class PathTooDeep(InvalidInput):
    pass


def checked_path(name: str) -> str:
    """Returns the path for a client's name. Raises InvalidInput, or OutsideFolder if the path
    leaves the user's folder.
    """
    path = path_inside("", name)
    if not path or len(path) > PATH_CHARACTERS_MAX or not is_storable(path):
        raise InvalidInput(f"a path has 1 to {PATH_CHARACTERS_MAX} characters, none of them NUL")
    if path.count("/") > PATH_FOLDERS_MAX:
        raise PathTooDeep(f"a path has at most {PATH_FOLDERS_MAX} folders")
    return path


async def read(plane: ControlPlane, caller: Caller, path: str) -> StoredUserdata:
    """Returns a file. Raises NotFound."""
    async with plane.context.tenant(caller.tenant.id) as tx:
        found = await store.get(tx, caller.tenant.id, caller.user_id, path)
    if found is None:
        raise _missing(path)
    return found


async def list_files(plane: ControlPlane, caller: Caller, folder: str) -> list[UserdataEntry]:
    """Returns all files in a folder and its subfolders, sorted by path. An empty list means that
    the folder doesn't exist.
    """
    async with plane.context.tenant(caller.tenant.id) as tx:
        found = await store.list_under(
            tx, caller.tenant.id, caller.user_id, folder, limit=FILES_MAX
        )
    return sorted(found, key=lambda entry: entry.path.split("/"))


async def has_any(plane: ControlPlane, caller: Caller) -> bool:
    async with plane.context.tenant(caller.tenant.id) as tx:
        return bool(await store.list_under(tx, caller.tenant.id, caller.user_id, "", limit=1))


async def write(
    plane: ControlPlane, caller: Caller, path: str, data: bytes, *, overwrites: bool
) -> UserdataEntry:
    """Stores a file. Raises Conflict if it exists and may not be overwritten, and InvalidInput if a
    folder has its name.
    """
    if len(data) > FILE_BYTES_MAX:
        raise LimitExceeded(f"a file has at most {FILE_BYTES_MAX:,} bytes")
    async with plane.context.tenant_transaction(caller.tenant.id) as tx:
        return await _write(tx, plane, caller, path, data, overwrites=overwrites)


async def _write(
    tx: Tx, plane: ControlPlane, caller: Caller, path: str, data: bytes, *, overwrites: bool
) -> UserdataEntry:
    tenant_id, user_id, now = caller.tenant.id, caller.user_id, plane.clock()
    if await store.is_blocked(tx, tenant_id, user_id, path):
        raise InvalidInput(f"{path} is a folder, or one of its folders is a file")
    files, size = await store.use_of_others(tx, tenant_id, user_id, than=path)
    if files >= FILES_MAX or size + len(data) > BYTES_MAX:
        raise StorageFull(f"a user has at most {FILES_MAX:,} files of {BYTES_MAX:,} bytes in all")
    row = {
        "tenant_id": tenant_id,
        "user_id": user_id,
        "path": path,
        "data": data,
        "size": len(data),
        "created_at": now,
        "modified_at": now,
    }
    if not await store.add(tx, row):
        if not overwrites:
            raise Conflict(f"there is a file {path} already")
        await store.put(tx, row)
    kept = await store.get(tx, tenant_id, user_id, path)
    if kept is None:
        raise _missing(path)
    return kept.entry


async def delete(plane: ControlPlane, caller: Caller, path: str) -> None:
    """Deletes a file. Raises NotFound."""
    async with plane.context.tenant_transaction(caller.tenant.id) as tx:
        if not await store.remove(tx, caller.tenant.id, caller.user_id, path):
            raise _missing(path)


async def move(
    plane: ControlPlane, caller: Caller, path: str, target: str, *, overwrites: bool
) -> UserdataEntry:
    """Moves a file. Raises NotFound and the errors of `write`."""
    tenant_id, user_id = caller.tenant.id, caller.user_id
    async with plane.context.tenant_transaction(tenant_id) as tx:
        data = await store.get_locked(tx, tenant_id, user_id, path)
        if data is None:
            raise _missing(path)
        if target != path:
            await store.remove(tx, tenant_id, user_id, path)
        return await _write(tx, plane, caller, target, data, overwrites=overwrites)


def _missing(path: str) -> NotFound:
    return NotFound(f"there is no file {path}")


async def read_settings(plane: ControlPlane, caller: Caller) -> dict[str, Any]:
    async with plane.context.tenant(caller.tenant.id) as tx:
        found = await store.get(tx, caller.tenant.id, caller.user_id, SETTINGS)
    return _parsed(None if found is None else found.data)


async def change_settings(plane: ControlPlane, caller: Caller, changes: Mapping[str, Any]) -> None:
    """Merges changes into the settings. An editor sends several at once, and none may be lost."""
    if is_larger(changes, bytes_max=SETTINGS_BYTES_MAX):
        raise _settings_too_large()
    tenant_id, user_id, now = caller.tenant.id, caller.user_id, plane.clock()
    row = {"tenant_id": tenant_id, "user_id": user_id, "path": SETTINGS, "size": 2}
    moments = {"created_at": now, "modified_at": now}
    async with plane.context.tenant_transaction(tenant_id) as tx:
        await store.add(tx, {**row, **moments, "data": b"{}"})
        settings = _parsed(await store.get_locked(tx, tenant_id, user_id, SETTINGS))
        data = json_text({**settings, **changes}).encode()
        if len(data) > SETTINGS_BYTES_MAX:
            raise _settings_too_large()
        await store.put(tx, {**row, **moments, "data": data, "size": len(data)})


def _settings_too_large() -> LimitExceeded:
    return LimitExceeded(f"settings have at most {SETTINGS_BYTES_MAX:,} bytes")


def _parsed(data: bytes | None) -> dict[str, Any]:
    if data is not None and len(data) > SETTINGS_BYTES_MAX:
        return {}  # not settings, but a file that was written under this name
    try:
        found = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
