"""Stores an editor's settings and files, such as workflows, for each user."""

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
# Limits the depth of paths, because a folder is listed with all of its subfolders.
PATH_FOLDERS_MAX = 20
# Limits the size of the settings, because each change reads and writes all of them.
SETTINGS_BYTES_MAX = 512 * 1024
FILES_MAX = 5_000
BYTES_MAX = 512 * 1024**2


class PathTooDeep(InvalidInput):
    pass


def checked_path(name: str) -> str:
    """Returns the path for a name that a client sent. Raises InvalidInput if the name isn't valid,
    and OutsideFolder if the path leaves the user's folder.
    """
    path = path_inside("", name)
    if not path or len(path) > PATH_CHARACTERS_MAX or not is_storable(path):
        raise InvalidInput(
            f"a path must have 1 to {PATH_CHARACTERS_MAX} characters and no NUL characters"
        )
    if path.count("/") > PATH_FOLDERS_MAX:
        raise PathTooDeep(f"a path can have at most {PATH_FOLDERS_MAX} folders")
    return path


async def read(plane: ControlPlane, caller: Caller, path: str) -> StoredUserdata:
    """Returns a file. Raises NotFound if it doesn't exist."""
    async with plane.context.tenant(caller.tenant.id) as tx:
        stored = await store.get(tx, caller.tenant.id, caller.user_id, path)
    if stored is None:
        raise _missing(path)
    return stored


async def list_files(plane: ControlPlane, caller: Caller, folder: str) -> list[UserdataEntry]:
    """Returns all files in a folder and its subfolders, sorted by path. An empty list means that
    the folder doesn't exist.
    """
    async with plane.context.tenant(caller.tenant.id) as tx:
        entries = await store.list_under(
            tx, caller.tenant.id, caller.user_id, folder, limit=FILES_MAX
        )
    return sorted(entries, key=lambda entry: entry.path.split("/"))


async def has_any(plane: ControlPlane, caller: Caller) -> bool:
    async with plane.context.tenant(caller.tenant.id) as tx:
        return bool(await store.list_under(tx, caller.tenant.id, caller.user_id, "", limit=1))


async def write(
    plane: ControlPlane, caller: Caller, path: str, data: bytes, *, overwrites: bool
) -> UserdataEntry:
    """Stores a file. Raises Conflict if it already exists and `overwrites` isn't set, and
    InvalidInput if the path is a folder or one of its parent folders is a file."""
    if len(data) > FILE_BYTES_MAX:
        raise LimitExceeded(f"a file can have at most {FILE_BYTES_MAX:,} bytes")
    async with plane.context.tenant_transaction(caller.tenant.id) as tx:
        return await _write(tx, plane, caller, path, data, overwrites=overwrites)


async def _write(
    tx: Tx, plane: ControlPlane, caller: Caller, path: str, data: bytes, *, overwrites: bool
) -> UserdataEntry:
    tenant_id, user_id, now = caller.tenant.id, caller.user_id, plane.clock()
    if await store.is_blocked(tx, tenant_id, user_id, path):
        raise InvalidInput(f"{path} is a folder, or one of its parent folders is a file")
    files, size = await store.use_of_others(tx, tenant_id, user_id, than=path)
    if files >= FILES_MAX or size + len(data) > BYTES_MAX:
        raise StorageFull(
            f"a user can have at most {FILES_MAX:,} files with {BYTES_MAX:,} bytes in total"
        )
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
            raise Conflict(f"file {path} already exists")
        await store.put(tx, row)
    stored = await store.get(tx, tenant_id, user_id, path)
    if stored is None:
        raise _missing(path)
    return stored.entry


async def delete(plane: ControlPlane, caller: Caller, path: str) -> None:
    """Deletes a file. Raises NotFound if it doesn't exist."""
    async with plane.context.tenant_transaction(caller.tenant.id) as tx:
        if not await store.remove(tx, caller.tenant.id, caller.user_id, path):
            raise _missing(path)


async def move(
    plane: ControlPlane, caller: Caller, path: str, target: str, *, overwrites: bool
) -> UserdataEntry:
    """Moves a file. Raises NotFound if it doesn't exist, and the same errors as `write`."""
    tenant_id, user_id = caller.tenant.id, caller.user_id
    async with plane.context.tenant_transaction(tenant_id) as tx:
        data = await store.get_locked(tx, tenant_id, user_id, path)
        if data is None:
            raise _missing(path)
        if target != path:
            await store.remove(tx, tenant_id, user_id, path)
        return await _write(tx, plane, caller, target, data, overwrites=overwrites)


def _missing(path: str) -> NotFound:
    return NotFound(f"file {path} was not found")


async def read_settings(plane: ControlPlane, caller: Caller) -> dict[str, Any]:
    async with plane.context.tenant(caller.tenant.id) as tx:
        stored = await store.get(tx, caller.tenant.id, caller.user_id, SETTINGS)
    return _parsed(None if stored is None else stored.data)


async def change_settings(plane: ControlPlane, caller: Caller, changes: Mapping[str, Any]) -> None:
    """Merges changes into the settings. The file is locked, because an editor sends several changes
    concurrently, and none may be lost.
    """
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
    return LimitExceeded(f"settings can have at most {SETTINGS_BYTES_MAX:,} bytes")


def _parsed(data: bytes | None) -> dict[str, Any]:
    if data is not None and len(data) > SETTINGS_BYTES_MAX:
        return {}  # The client has stored another file under the settings' name.
    try:
        settings = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}
