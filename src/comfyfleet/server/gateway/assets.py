"""Stores and finds a user's assets: uploads and outputs that have an id and a content hash."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID

from blake3 import blake3

from comfyfleet.errors import Conflict, InvalidInput, NotFound
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db import Tx
from comfyfleet.server.gateway import files as user_files
from comfyfleet.server.gateway.model import gateway_data
from comfyfleet.server.gateway.v2_model import (
    EXPIRES_AT,
    TAGS,
    AssetReference,
    expiry_of,
    parse_reference,
    references_in,
    with_names,
)
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import CONTENT_HASH, File, job_in_key
from comfyfleet.server.run_log import service as run_log
from comfyfleet.server.run_log.model import UserFile
from comfyfleet.server.tenants.model import Caller

HASH_PREFIX = "blake3:"
INPUT, MODELS = "input", "models"
NAMES_TRIED_MAX = 1_000
TAGS_MAX, TAG_CHARACTERS_MAX = 50, 100
REFERENCES_MAX = 1_000


class HashMismatch(Conflict):
    code = "hash_mismatch"


class AssetInUse(Conflict):
    code = "asset_in_use"


class AssetBytesNotFound(NotFound):
    code = "blob_not_found"


class MissingAsset(InvalidInput):
    code = "missing_asset"


@dataclass(frozen=True, slots=True)
class NewAsset:
    """The description of an upload. `path` is the name that the user chose."""

    path: str
    content_type: str
    expected_hash: str | None = None
    tags: tuple[str, ...] = ()
    expires_in: int | None = None  # seconds


class UserAsset(NamedTuple):
    """An asset of a user. `prompt_id` is set if a prompt created the asset."""

    file: File
    path: str
    prompt_id: str | None = None
    is_new: bool = True


def check_path(path: str) -> str:
    """Checks the path of an upload and returns it relative to the input folder."""
    plain = path.strip().replace("\\", "/")
    clean = user_files.clean_path(plain)
    if not clean or plain.startswith("/") or ".." in plain.split("/") or "\0" in plain:
        raise InvalidInput("file_path must be a path without '..'", field="file_path")
    head, _, rest = clean.partition("/")
    if head == MODELS:
        raise InvalidInput(
            "models can't be uploaded; the operator of the fleet installs them", field="file_path"
        )
    return rest if head == INPUT and rest else clean


def parse_hash(text: object) -> str:
    digest = text.removeprefix(HASH_PREFIX).lower() if isinstance(text, str) else ""
    if not isinstance(text, str) or not text.startswith(HASH_PREFIX):
        raise InvalidInput("hash must have the form blake3:<hex>", field="hash")
    if not CONTENT_HASH.fullmatch(digest):
        raise InvalidInput("a BLAKE3 hash must have 64 hexadecimal digits", field="hash")
    return digest


async def store_asset(
    plane: ControlPlane, caller: Caller, upload: Path, wanted: NewAsset
) -> UserAsset:
    """Stores an upload. Bytes that the user already has are not stored again."""
    digest = await asyncio.to_thread(_hash, upload)
    if wanted.expected_hash is not None and wanted.expected_hash != digest:
        raise HashMismatch(
            "the uploaded bytes don't match the expected hash", hash=f"{HASH_PREFIX}{digest}"
        )
    known = await _find_by_hash(plane, caller, digest)
    if known is not None:
        return await _reuse_file(plane, caller, known, wanted)
    named = UserFile(INPUT, wanted.path)
    stored = await user_files.store_upload(
        plane, caller, upload, named, wanted.content_type, overwrites=False
    )
    file = await user_files.find_file(plane, caller, stored.folder, stored.path)
    return UserAsset(await _update_metadata(plane, caller, file, wanted, is_new=True), stored.path)


def _hash(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


async def mint_asset(
    plane: ControlPlane, caller: Caller, digest: str, wanted: NewAsset
) -> UserAsset:
    """Creates an asset from bytes that the user has already stored. Raises AssetBytesNotFound if no
    file of the user has this hash.
    """
    known = await _find_by_hash(plane, caller, digest)
    if known is None:
        raise AssetBytesNotFound("none of your assets has this hash")
    return await _reuse_file(plane, caller, known, wanted)


async def has_bytes(plane: ControlPlane, caller: Caller, digest: str) -> bool:
    return await _find_by_hash(plane, caller, digest) is not None


async def _reuse_file(
    plane: ControlPlane, caller: Caller, known: File, wanted: NewAsset
) -> UserAsset:
    file = await _update_metadata(plane, caller, known, wanted)
    async with plane.pools[caller.tenant.pool].transaction() as tx:
        path = await _input_name(tx, plane, caller, file, wanted.path or file.filename)
    return UserAsset(file, path, is_new=False)


async def _find_by_hash(plane: ControlPlane, caller: Caller, digest: str) -> File | None:
    async with plane.context.tenant(caller.tenant.id) as tx:
        file = await media.file_by_hash(tx, caller.tenant.id, caller.user_id, digest)
    return None if file is None or _is_expired(file, plane.clock()) else file


def _is_expired(file: File, now: datetime) -> bool:
    expiry = expiry_of(file)
    return expiry is not None and expiry <= now


async def _update_metadata(
    plane: ControlPlane, caller: Caller, file: File, wanted: NewAsset, *, is_new: bool = False
) -> File:
    """Adds tags to a file and extends its expiry time. An expiry time is never shortened."""
    metadata = {name: value for name, value in file.metadata.items() if name != EXPIRES_AT}
    if wanted.tags:
        metadata[TAGS] = sorted({*metadata.get(TAGS, ()), *wanted.tags})[:TAGS_MAX]
    expiry = expiry_of(file)
    if wanted.expires_in is not None and (is_new or expiry is not None):
        until = plane.clock() + timedelta(seconds=wanted.expires_in)
        metadata[EXPIRES_AT] = max(until, expiry or until).isoformat()
    if metadata == file.metadata:
        return file
    async with plane.pools[caller.tenant.pool].transaction() as tx:
        return await media.set_metadata(tx, caller.tenant.id, file.id, metadata)


async def find_asset(plane: ControlPlane, caller: Caller, asset_id: str) -> UserAsset:
    """Returns the user's asset. Raises NotFound for other users' assets as well."""
    async with plane.context.tenant(caller.tenant.id) as tx:
        file = await _own_file(tx, plane, caller, asset_id)
        output = await _output_name(tx, caller, file)
        if output is not None:
            named, prompt_id = output
            return UserAsset(file, named.path, prompt_id)
        names = await run_log.names_of_file(tx, caller.tenant.id, caller.user_id, file.id)
    return UserAsset(file, names[0].path if names else file.filename)


async def _own_file(tx: Tx, plane: ControlPlane, caller: Caller, asset_id: str) -> File:
    try:
        file = await media.get_file(tx, caller.tenant.id, UUID(asset_id))
    except (ValueError, NotFound) as error:
        raise NotFound("the asset was not found") from error
    is_available = file.user_id == caller.user_id and not file.is_announced
    if not is_available or _is_expired(file, plane.clock()):
        raise NotFound("the asset was not found")
    return file


async def _output_name(tx: Tx, caller: Caller, file: File) -> tuple[UserFile, str] | None:
    """Returns the name of an output and the id of the prompt that created it. Returns None if the
    file isn't an output of a prompt.
    """
    job_id = job_in_key(file.path)
    job = await jobs.find(tx, caller.tenant.id, job_id) if job_id else None
    if job is None or job.spec.user_id != caller.user_id or job.spec.gateway is None:
        return None
    name = next((output.name for output in job.outputs if output.file_id == file.id), None)
    files = await run_log.files_of_jobs(tx, caller.tenant.id, [job.id])
    named = next((entry for entry in files.get(job.id, ()) if entry.output == name), None)
    return None if named is None else (named, str(gateway_data(job)["prompt_id"]))


async def delete_asset(plane: ControlPlane, caller: Caller, asset_id: str) -> None:
    """Deletes an asset. Raises AssetInUse if a media item or a queued or running prompt uses it."""
    tenant_id, user_id = caller.tenant.id, caller.user_id
    async with plane.pools[caller.tenant.pool].transaction() as tx:
        file = await _own_file(tx, plane, caller, asset_id)
        await media.lock_file(tx, tenant_id, file.id)
        if await jobs.is_needed_by_prompts(tx, tenant_id, user_id, file.id):
            raise AssetInUse("the asset is used by a queued or running job")
        if await media.is_in_media(tx, tenant_id, file.id):
            raise AssetInUse("the asset is used by one of your media items; delete that item first")
        await run_log.delete_names(tx, tenant_id, user_id, file.id)
        await media.delete_file(tx, tenant_id, file.id)
    await plane.store.delete(*file.object_keys)


async def name_references(
    plane: ControlPlane, caller: Caller, workflow: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Returns the workflow with asset references replaced by file names. Raises MissingAsset if an
    asset doesn't exist.
    """
    references = {parse_reference(value) for value in references_in(workflow)}
    if len(references) > REFERENCES_MAX:
        raise InvalidInput(f"a workflow can refer to at most {REFERENCES_MAX} assets")
    if not references:
        return workflow
    names: dict[AssetReference, str] = {}
    missing: list[str] = []
    for reference in sorted(references, key=str):
        try:
            names[reference] = await _name_reference(plane, caller, reference)
        except (NotFound, InvalidInput):
            missing.append(reference.shown)
    if missing:
        raise MissingAsset(f"assets were not found: {', '.join(missing)}", missing_ids=missing)
    named: Mapping[str, Any] = with_names(workflow, names)
    return named


async def _name_reference(plane: ControlPlane, caller: Caller, reference: AssetReference) -> str:
    asset_id = reference.id
    if asset_id is None:
        known = await _find_by_hash(plane, caller, parse_hash(reference.hash))
        if known is None:
            raise NotFound("the asset was not found")
        asset_id = str(known.id)
    async with plane.pools[caller.tenant.pool].transaction() as tx:
        file = await _own_file(tx, plane, caller, asset_id)
        output = await _output_name(tx, caller, file)
        if output is not None:
            named, _ = output
            return f"{named.path} [{named.folder}]"
        path = user_files.clean_path(reference.path or "") or file.filename
        return await _input_name(tx, plane, caller, file, path)


async def _input_name(tx: Tx, plane: ControlPlane, caller: Caller, file: File, path: str) -> str:
    """Returns a name of the file in the input folder. Prefers the requested path and then any name
    with the same suffix, because nodes rely on the suffix. If neither exists, adds a name.
    """
    tenant_id, user_id = caller.tenant.id, caller.user_id
    known = await run_log.names_of_file(tx, tenant_id, user_id, file.id)
    paths = [named.path for named in known if named.folder == INPUT]
    if path in paths:
        return path
    alike = [other for other in paths if _suffix(other) == _suffix(path)]
    if alike:
        return alike[0]
    await user_files.require_room(tx, caller)
    for number in range(NAMES_TRIED_MAX):
        tried = user_files.numbered(path, number)
        named = UserFile(INPUT, tried, file.id)
        if await run_log.add_file(tx, tenant_id, user_id, named, now=plane.clock()):
            return tried
    raise InvalidInput(f"too many files have names like {path}", field="file_path")


def _suffix(path: str) -> str:
    return PurePosixPath(path).suffix.lower()
