"""A user's files by the names that ComfyUI would give them: uploads, outputs, and which a prompt names."""

import asyncio
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from blake3 import blake3

from comfyfleet.errors import InvalidInput, NotFound
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db import Tx
from comfyfleet.server.gateway.offers import upload_inputs
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File, stored_key
from comfyfleet.server.run_log import service as run_log
from comfyfleet.server.run_log.model import FOLDERS, PATH_CHARACTERS_MAX, UserFile
from comfyfleet.server.tenants.model import Caller

# `cat.png [output]` names a file of another folder than that of inputs.
_ANNOTATED = re.compile(r"(?P<path>.*?) ?\[(?P<folder>input|output|temp)\]\s*")
NAMES_TRIED_MAX = 10_000
NAMES_LISTED_MAX = 10_000


def split_annotation(name: str, folder: str = "input") -> tuple[str, str]:
    """Folder and path of what a loader's input, or a view, names."""
    found = _ANNOTATED.fullmatch(name)
    return (found["folder"], found["path"]) if found else (folder, name)


@dataclass(frozen=True)
class NamedFiles:
    """The user's files that a prompt names, as it names them."""

    by_kind: dict[str, list[str]] = field(default_factory=dict)
    file_ids: dict[str, UUID] = field(default_factory=dict)


async def named_in(
    plane: ControlPlane,
    caller: Caller,
    prompt: Mapping[str, Mapping[str, Any]],
    object_info: Mapping[str, Mapping[str, Any]],
) -> NamedFiles:
    found = NamedFiles()
    names = set(_names(prompt, object_info))
    if not names:
        return found
    async with plane.context.tenant(caller.tenant.id) as tx:
        for kind, name in sorted(names):
            file_id = await _file_id(tx, caller, *split_annotation(name))
            if file_id is not None:
                found.by_kind.setdefault(kind, []).append(name)
                found.file_ids[name] = file_id
    return found


def _names(
    prompt: Mapping[str, Mapping[str, Any]], object_info: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    for node in prompt.values():
        for name, kind in upload_inputs(object_info.get(str(node.get("class_type")), {})).items():
            value = (node.get("inputs") or {}).get(name)
            if isinstance(value, str):
                yield kind, value


async def _file_id(tx: Tx, caller: Caller, folder: str, path: str) -> UUID | None:
    named = await run_log.get_file(tx, caller.tenant.id, caller.user_id, folder, clean_path(path))
    return None if named is None else await _stored_id(tx, caller, named)


async def _stored_id(tx: Tx, caller: Caller, named: UserFile) -> UUID | None:
    """Of an output, as soon as its job has it."""
    if named.file_id is not None or named.job_id is None:
        return named.file_id
    job = await jobs.find(tx, caller.tenant.id, named.job_id)
    outputs = job.outputs if job else ()
    return next((each.file_id for each in outputs if each.name == named.output), None)


def clean_path(path: str) -> str:
    """Without empty parts, `.` and `..`: a name leads nowhere but into its own folder."""
    parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".")]
    if ".." in parts:
        return ""
    return "/".join(parts)[:PATH_CHARACTERS_MAX]


async def find_file(plane: ControlPlane, caller: Caller, folder: str, path: str) -> File:
    """Raises NotFound."""
    async with plane.context.tenant(caller.tenant.id) as tx:
        file_id = await _file_id(tx, caller, folder, path)
        if file_id is None:
            raise NotFound(f"there is no file {path}")
        return await media.get_file(tx, caller.tenant.id, file_id)


async def list_names(plane: ControlPlane, caller: Caller, folder: str) -> list[str]:
    """The newest first, without those of subfolders."""
    async with plane.context.tenant(caller.tenant.id) as tx:
        found = await run_log.list_files(
            tx, caller.tenant.id, caller.user_id, folder, limit=NAMES_LISTED_MAX
        )
    return [each.path for each in found if not each.subfolder]


async def store_upload(
    plane: ControlPlane,
    caller: Caller,
    upload: Path,
    named: UserFile,
    content_type: str,
    *,
    overwrites: bool,
) -> UserFile:
    """Under the name given, or the next free one; the same bytes under it are that file."""
    content_hash = await asyncio.to_thread(_hash, upload)
    for number in range(NAMES_TRIED_MAX):
        tried = named if number == 0 else named._replace(path=_numbered(named.path, number))
        try:
            present = await find_file(plane, caller, tried.folder, tried.path)
        except NotFound:
            return await _add(plane, caller, upload, tried, content_type, content_hash)
        if present.content_hash == content_hash:
            return tried
        if overwrites:
            return await _add(plane, caller, upload, tried, content_type, content_hash)
    raise InvalidInput(f"there are too many files like {named.path}")


def _hash(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


def _numbered(path: str, number: int) -> str:
    stem, dot, ending = path.rpartition(".")
    return f"{stem} ({number}){dot}{ending}" if dot else f"{path} ({number})"


async def _add(
    plane: ControlPlane,
    caller: Caller,
    upload: Path,
    named: UserFile,
    content_type: str,
    content_hash: str,
) -> UserFile:
    file_id, now = plane.context.new_id(), plane.clock()
    suffix = Path(named.filename).suffix[:20]
    key = stored_key(caller.tenant.id, file_id, plane.context.new_id(), suffix)
    await plane.store.put_file(key, upload, content_type)
    file = File(
        id=file_id,
        tenant_id=caller.tenant.id,
        user_id=caller.user_id,
        disk=plane.store.disk,
        path=key,
        filename=named.filename[:300],
        mime_type=content_type,
        size=(await asyncio.to_thread(upload.stat)).st_size,
        content_hash=content_hash,
        created_at=now,
        checked_at=now,
    )
    kept = named._replace(file_id=file_id)
    async with plane.pools[caller.tenant.pool].transaction() as tx:
        await media.add_file(tx, file)
        await run_log.replace_file(tx, caller.tenant.id, caller.user_id, kept, now=now)
    return kept


def check_folder(name: str) -> str:
    if name not in FOLDERS:
        raise InvalidInput(f"{name!r} is no folder: input, output, temp")
    return name
