"""Finds and stores a user's uploads and outputs by the names that they would have in ComfyUI."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from blake3 import blake3

from comfyfleet.api.values import is_storable
from comfyfleet.errors import InvalidInput, LimitExceeded, NotFound, StorageFull
from comfyfleet.media import SNIFF_BYTES, measure_picture, require_pixels, sniff_type
from comfyfleet.protocol import files as protocol
from comfyfleet.protocol.payloads import RefusedPrompt, UnforeseenInput
from comfyfleet.protocol.validation import WRAPPED, fault
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db import Tx
from comfyfleet.server.gateway.offers import ObjectInfo, upload_inputs
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs.files import REFUSALS, suffix_of
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File, stored_key
from comfyfleet.server.run_log import service as run_log
from comfyfleet.server.run_log.model import PATH_CHARACTERS_MAX, UserFile
from comfyfleet.server.tenants.model import Caller

NAMES_TRIED_MAX = 10_000
NAMES_LISTED_MAX = 10_000
FILES_NAMED_MAX = 1_000
# Maximum number of upload names per user.
UPLOADS_MAX = 20_000
# Maximum number of attempts to add a name. An attempt fails if another request takes the name
# between the check and the insert.
RACES_MAX = 100
# The longest filename that common file systems support. Backends store uploads as files.
FILENAME_BYTES_MAX = 255
GENERIC_TYPES = ("", "application/octet-stream")


def split_annotation(name: str, folder: str = "input") -> tuple[str, str]:
    """Splits a name such as `a.png [output]` into the folder and the path. `folder` is the default
    if the name has no annotation.
    """
    path, named = protocol.split_annotation(name, folder)
    return named, path


@dataclass(frozen=True)
class NamedFiles:
    """The user's files that a prompt refers to, by their names in the prompt."""

    by_kind: dict[str, list[str]] = field(default_factory=dict)
    file_ids: dict[str, UUID] = field(default_factory=dict)


def names_in(
    prompt: Mapping[str, Mapping[str, Any]], object_infos: Sequence[ObjectInfo]
) -> frozenset[tuple[str, str]]:
    """Returns the kinds and names of the files that a prompt refers to. Uses the object_info of all
    backends, because an input may be a file input on only some of them.
    """
    names: set[tuple[str, str]] = set()
    for object_info in object_infos:
        names.update(_names(prompt, object_info))
    if len(names) > FILES_NAMED_MAX:
        message = f"A prompt can refer to at most {FILES_NAMED_MAX:,} files"
        raise RefusedPrompt(fault("prompt_too_large", message, f"{len(names):,} files"))
    return frozenset(names)


async def find_named(
    plane: ControlPlane, caller: Caller, names: Collection[tuple[str, str]]
) -> NamedFiles:
    """Finds the user's files with these names. Names without a file are left out."""
    files = NamedFiles()
    if not names:
        return files
    async with plane.context.tenant(caller.tenant.id) as tx:
        for kind, name in sorted(names):
            file_id = await _file_id(tx, caller, *split_annotation(name))
            if file_id is not None:
                files.by_kind.setdefault(kind, []).append(name)
                files.file_ids[name] = file_id
    return files


def _names(
    prompt: Mapping[str, Mapping[str, Any]], object_info: ObjectInfo
) -> Iterator[tuple[str, str]]:
    for node in prompt.values():
        for name, kind in upload_inputs(object_info.get(str(node.get("class_type")), {})).items():
            value = (node.get("inputs") or {}).get(name)
            named = value.get(WRAPPED) if isinstance(value, Mapping) else value
            if isinstance(named, str):
                yield kind, named


async def _file_id(tx: Tx, caller: Caller, folder: str, path: str) -> UUID | None:
    named = await run_log.get_file(tx, caller.tenant.id, caller.user_id, folder, clean_path(path))
    return None if named is None else await _stored_id(tx, caller, named)


async def _stored_id(tx: Tx, caller: Caller, named: UserFile) -> UUID | None:
    """Returns the file id of a name, or None for an output that its job doesn't contain yet."""
    if named.file_id is not None or named.job_id is None:
        return named.file_id
    job = await jobs.find(tx, caller.tenant.id, named.job_id)
    outputs = job.outputs if job else ()
    return next((output.file_id for output in outputs if output.name == named.output), None)


def clean_path(path: str) -> str:
    """Returns the path without empty parts, `.` and `..`. Returns an empty string if the path
    leaves its folder or can't be stored.
    """
    try:
        clean = protocol.path_inside("", path)
    except InvalidInput:
        return ""
    return clean if len(clean) <= PATH_CHARACTERS_MAX and is_storable(clean) else ""


def upload_path(subfolder: str, name: str) -> str:
    """Returns the path of an upload. Raises OutsideFolder if the path leaves the folder, and
    InvalidInput if the name can't be stored.
    """
    path = protocol.path_inside(subfolder, name)
    filename = path.rpartition("/")[2]
    is_short = len(path) <= PATH_CHARACTERS_MAX
    if not filename or not is_short or not is_storable(path):
        raise InvalidInput(
            f"a file path must have 1 to {PATH_CHARACTERS_MAX} characters and no NUL characters"
        )
    if len(filename.encode()) > FILENAME_BYTES_MAX:
        raise InvalidInput(f"a filename can have at most {FILENAME_BYTES_MAX} bytes")
    return path


async def find_file(plane: ControlPlane, caller: Caller, folder: str, path: str) -> File:
    """Returns the user's file. Raises NotFound if the user has no file with this name."""
    async with plane.context.tenant(caller.tenant.id) as tx:
        file_id = await _file_id(tx, caller, folder, path)
        if file_id is None:
            raise NotFound(f"file {path} was not found")
        return await media.get_file(tx, caller.tenant.id, file_id)


async def list_names(plane: ControlPlane, caller: Caller, folder: str) -> list[str]:
    """Lists the names of the files in a folder, newest first. Files in subfolders are left out."""
    async with plane.context.tenant(caller.tenant.id) as tx:
        files = await run_log.list_files(
            tx, caller.tenant.id, caller.user_id, folder, limit=NAMES_LISTED_MAX
        )
    return [file.path for file in files if not file.subfolder]


async def read_part(
    plane: ControlPlane, file: File, start: int, length: int
) -> AsyncIterator[bytes]:
    """Reads a non-empty part of a file. If the object is missing, raises NotFound immediately and
    not during the iteration.
    """
    chunks = plane.store.chunks(file.path, start=start, length=length)
    first = await anext(chunks, b"")
    return _continued(first, chunks)


async def _continued(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async with aclosing(rest):  # type: ignore[type-var]
        yield first
        async for chunk in rest:
            yield chunk


async def fetch(plane: ControlPlane, file: File, to: Path) -> None:
    """Copies a user's file to this machine. Raises NotFound if the object is missing."""
    with await asyncio.to_thread(to.open, "wb") as target:
        async for chunk in plane.store.chunks(file.path):
            await asyncio.to_thread(target.write, chunk)


class NameChoice(NamedTuple):
    named: UserFile
    is_known: bool  # True if a file with these bytes already has the name


async def store_upload(
    plane: ControlPlane,
    caller: Caller,
    upload: Path,
    named: UserFile,
    content_type: str = "",
    *,
    overwrites: bool,
    compared: Path | None = None,
) -> UserFile:
    """Stores an upload under its name, or under the next free one. If a file with such a name has
    the same bytes, returns that file.

    If `compared` is set, its bytes are compared with those of existing files instead of the
    upload's. The object is stored before its row is added. If that fails, the object is deleted,
    either immediately or by a sweep.
    """
    content_hash = await asyncio.to_thread(_hash, upload)
    known_by = await asyncio.to_thread(_hash, compared) if compared else content_hash
    if not overwrites:
        choice = await choose_name(plane, caller, named, known_by)
        if choice.is_known:
            return choice.named
    file = await _stored(plane, caller, upload, named, content_type, content_hash)
    try:
        choice = await _take_name(plane, caller, file, named, known_by, overwrites=overwrites)
    except (NotFound, *REFUSALS):
        await plane.store.delete(file.path)
        raise
    if choice.is_known:
        await plane.store.delete(file.path)
    return choice.named


async def choose_name(
    plane: ControlPlane, caller: Caller, named: UserFile, content_hash: str
) -> NameChoice:
    async with plane.context.tenant(caller.tenant.id) as tx:
        return await _choose_name(tx, caller, named, content_hash)


async def _choose_name(tx: Tx, caller: Caller, named: UserFile, content_hash: str) -> NameChoice:
    """Returns the first of the names `a.png`, `a (1).png` and so on that is free or belongs to a
    file with these bytes.
    """
    tenant_id, user_id = caller.tenant.id, caller.user_id
    known = await run_log.numbered_files(
        tx, tenant_id, user_id, named.folder, named.path, limit=NAMES_TRIED_MAX
    )
    for number in range(NAMES_TRIED_MAX):
        path = numbered(named.path, number)
        if path not in known:
            return NameChoice(named._replace(path=path), is_known=False)
        other, other_hash = known[path]
        if other_hash is None:
            other_hash = await _output_hash(tx, caller, other)
        if other_hash == content_hash:
            return NameChoice(other, is_known=True)
    raise InvalidInput(f"too many files have names like {named.path}")


async def _output_hash(tx: Tx, caller: Caller, named: UserFile) -> str | None:
    file_id = await _stored_id(tx, caller, named)
    files = await media.find_existing(tx, caller.tenant.id, [file_id]) if file_id else {}
    return files[file_id].content_hash if file_id in files else None


def numbered(path: str, number: int) -> str:
    return protocol.numbered_name(path, number)


async def require_folder(
    plane: ControlPlane, caller: Caller, named: UserFile, subfolder: str
) -> None:
    """Raises UnforeseenInput if the filename contains a folder that doesn't exist. ComfyUI fails in
    the same way.
    """
    if named.subfolder in ("", protocol.path_inside(subfolder)):
        return
    async with plane.context.tenant(caller.tenant.id) as tx:
        exists = await run_log.has_files_under(
            tx, caller.tenant.id, caller.user_id, named.folder, named.subfolder
        )
    if not exists:
        raise UnforeseenInput(f"folder {named.subfolder} doesn't exist")


async def _stored(
    plane: ControlPlane,
    caller: Caller,
    upload: Path,
    named: UserFile,
    content_type: str,
    content_hash: str,
) -> File:
    """Stores the object and returns its file. The file's row is added later."""
    size, media_type = await asyncio.to_thread(_inspect, plane, upload, named, content_type)
    file_id = plane.context.new_id()
    suffix = suffix_of(named.filename, media_type)
    key = stored_key(caller.tenant.id, file_id, plane.context.new_id(), suffix)
    await plane.store.put_file(key, upload, media_type)
    return File(
        id=file_id,
        tenant_id=caller.tenant.id,
        user_id=caller.user_id,
        disk=plane.store.disk,
        path=key,
        filename=named.filename,
        mime_type=media_type,
        size=size,
        content_hash=content_hash,
        created_at=plane.clock(),
    )


def _inspect(
    plane: ControlPlane, upload: Path, named: UserFile, content_type: str
) -> tuple[int, str]:
    """Checks the limits and returns the size and media type. The type comes from the first bytes of
    the file, from the client's content type, or from the filename, in this order.
    """
    size, most = upload.stat().st_size, plane.settings.max_upload_bytes
    if size > most:
        raise LimitExceeded(f"the file has {size:,} bytes; the limit is {most:,}", max_bytes=most)
    require_pixels(measure_picture(upload), plane.settings.max_picture_pixels)
    with upload.open("rb") as file:
        sniffed = sniff_type(file.read(SNIFF_BYTES))
    claimed = "" if content_type in GENERIC_TYPES else content_type
    return size, sniffed or claimed or protocol.file_headers(named.filename)["content-type"]


async def _take_name(
    plane: ControlPlane,
    caller: Caller,
    file: File,
    named: UserFile,
    known_by: str,
    *,
    overwrites: bool,
) -> NameChoice:
    """Adds the rows of the file and its name in one transaction."""
    tenant_id, user_id, now = caller.tenant.id, caller.user_id, plane.clock()
    own = caller.tenant.max_storage_bytes
    most = plane.settings.max_storage_bytes_per_tenant if own is None else own
    async with plane.pools[caller.tenant.pool].transaction() as tx:
        await media.require_quota(tx, tenant_id, file.size or 0, most=most)
        await require_room(tx, caller)
        if overwrites:
            await media.add_file(tx, file)
            stored = named._replace(file_id=file.id)
            await run_log.replace_file(tx, tenant_id, user_id, stored, now=now)
            return NameChoice(stored, is_known=False)
        for _ in range(RACES_MAX):
            choice = await _choose_name(tx, caller, named, known_by)
            if choice.is_known:
                return choice
            stored = choice.named._replace(file_id=file.id)
            if await run_log.add_file(tx, tenant_id, user_id, stored, now=now):
                await media.add_file(tx, file)
                return NameChoice(stored, is_known=False)
    raise InvalidInput(f"too many concurrent uploads of {named.path}; retry in a moment")


async def require_room(tx: Tx, caller: Caller) -> None:
    """Raises StorageFull if the user has the maximum number of uploads, whatever their size."""
    if (
        await run_log.count_uploads(tx, caller.tenant.id, caller.user_id, most=UPLOADS_MAX)
        >= UPLOADS_MAX
    ):
        raise StorageFull(f"a user can have at most {UPLOADS_MAX:,} uploads")


def _hash(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()
