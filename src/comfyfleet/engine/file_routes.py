"""Routes for files: uploads, views of the three folders (whole files or ranges), and image
previews."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol, get_args

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import Response

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.node import FolderName, Folders, require_small
from comfyfleet.protocol.files import (
    FileReply,
    FileStamp,
    OutsideFolder,
    ViewedFile,
    ViewRefused,
    disposition_of,
    file_headers,
    numbered_name,
    parse_original,
    parse_upload,
    parse_view,
    plan_reply,
)
from comfyfleet.protocol.http import Route, empty_reply, json_reply, open_form
from comfyfleet.protocol.payloads import UnforeseenInput
from comfyfleet.protocol.pictures import put_mask, shown_picture

CHUNK_BYTES = 256 * 1024


def path_reply(path: Path, request: Request, headers: dict[str, str]) -> FileReply:
    """Streams a file from disk."""
    status = path.stat()
    stamp = FileStamp(status.st_size, status.st_mtime_ns)
    plan = plan_reply(request.headers, stamp)
    has_body = request.method != "HEAD" and plan.length > 0
    chunks = _chunks(path, plan.start, plan.length) if has_body else None
    return FileReply(plan, stamp, headers, chunks)


async def _chunks(path: Path, start: int, remaining: int) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while remaining > 0 and (chunk := await _read(file.fileno(), min(remaining, CHUNK_BYTES))):
            remaining -= len(chunk)
            yield chunk


async def _read(descriptor: int, size: int) -> bytes:
    # Small files are read directly, because that is faster than switching to a thread.
    if size < CHUNK_BYTES:
        return os.read(descriptor, size)
    return await asyncio.to_thread(os.read, descriptor, size)


COPY_BYTES = 1024 * 1024


class SaveUpload(Protocol):
    """A function that writes an upload to a path."""

    def __call__(self, upload: BinaryIO, path: Path) -> None: ...


def upload_path(folder: Path, subfolder: str, name: str) -> Path:
    """Returns the path for a folder and name that a client sent. Raises OutsideFolder if it is
    outside the folder."""
    base = os.path.abspath(folder)
    path = os.path.abspath(os.path.join(base, os.path.normpath(subfolder), name))
    if not Path(path).is_relative_to(base):
        raise OutsideFolder(f"{name!r} is outside its folder", name=name)
    return Path(path)


def store_upload(
    upload: BinaryIO, folder: Path, *, subfolder: str, name: str, overwrite: bool, save: SaveUpload
) -> str:
    """Saves a file under its name, or under a numbered name if a file with different bytes exists.
    Returns the name."""
    try:
        path = upload_path(folder, subfolder, name)
        (folder / os.path.normpath(subfolder)).mkdir(parents=True, exist_ok=True)
        name, path, known = _free_name(upload, path, name, overwrite=overwrite)
        if not known:
            save(upload, path)
    except (OSError, ValueError) as error:
        raise UnforeseenInput(f"{name!r} can't be saved: {error}") from error
    return name


def save_bytes(upload: BinaryIO, path: Path) -> None:
    with path.open("wb") as file:
        while chunk := upload.read(COPY_BYTES):
            file.write(chunk)


def _free_name(
    upload: BinaryIO, path: Path, name: str, *, overwrite: bool
) -> tuple[str, Path, bool]:
    """Returns a name, its path, and whether a file with the same bytes already exists there, so
    that nothing must be written."""
    if overwrite:
        return name, path, False
    number, candidate = 0, path
    while candidate.exists():
        if _same_bytes(upload, candidate):
            return numbered_name(name, number), candidate, True
        number += 1
        candidate = path.parent / os.path.basename(numbered_name(name, number))
    return numbered_name(name, number), candidate, False


def _same_bytes(upload: BinaryIO, path: Path) -> bool:
    with path.open("rb") as file:
        upload.seek(0)
        while chunk := upload.read(COPY_BYTES):
            if file.read(len(chunk)) != chunk:
                break
        else:
            same = not file.read(1)
            upload.seek(0)
            return same
    upload.seek(0)
    return False


async def post_image(engine: Engine, request: Request) -> Response:
    async with open_form(request) as form:
        return await _store(engine.folders, form, save_bytes)


async def post_mask(engine: Engine, request: Request) -> Response:
    async with open_form(request) as form:
        return await _store(engine.folders, form, partial(save_mask, engine.folders, form))


async def _store(folders: Folders, form: FormData, save: SaveUpload) -> Response:
    upload = parse_upload(form)
    if upload is None:
        return empty_reply(400)
    store = partial(
        store_upload,
        upload.image.file,
        folders.of(_folder_named(upload.folder)),
        subfolder=upload.subfolder,
        name=upload.name,
        overwrite=upload.overwrites,
        save=save,
    )
    try:
        name = await run_in_threadpool(store)
    except OutsideFolder:
        return empty_reply(400)
    return json_reply({"name": name, "subfolder": upload.subfolder, "type": upload.folder})


def _folder_named(name: str) -> FolderName:
    return next(folder for folder in get_args(FolderName) if folder == name)


def save_mask(folders: Folders, form: FormData, upload: BinaryIO, path: Path) -> None:
    """Saves a mask into a copy of the original image. If the original doesn't exist, nothing is
    written and no error is raised, as in ComfyUI."""
    original = _find_original(folders, form)
    if original is not None and original.is_file():
        put_mask(upload, original, path, require_small)


def _find_original(folders: Folders, form: FormData) -> Path | None:
    viewed = parse_original(form)
    try:
        return None if viewed is None else _parent(folders, viewed) / viewed.name
    except ViewRefused:
        return None


def resolve_view(folders: Folders, query: Mapping[str, str]) -> tuple[Path, str]:
    """Returns the folder and name for `filename`, `type` and `subfolder`. The file need not
    exist."""
    viewed = parse_view(query)
    return _parent(folders, viewed), viewed.base


def _parent(folders: Folders, viewed: ViewedFile) -> Path:
    try:
        return upload_path(folders.of(_folder_named(viewed.folder)), viewed.subfolder, "")
    except OutsideFolder as error:
        raise ViewRefused(403) from error


async def get_view(engine: Engine, request: Request) -> Response:
    query = dict(request.query_params)
    if "filename" not in query:
        return empty_reply(404)
    try:
        parent, name = resolve_view(engine.folders, query)
    except ViewRefused as refused:
        return empty_reply(refused.status)
    path = parent / name
    if not _is_file(path):
        return empty_reply(404)
    return await reply_with_file(path, query, request)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


async def reply_with_file(path: Path, query: Mapping[str, str], request: Request) -> Response:
    parameters = query.get("preview"), query.get("channel")
    preview = await run_in_threadpool(shown_picture, path, *parameters, require_small)
    if preview is None:
        return path_reply(path, request, file_headers(path.name))
    content, kind = preview
    headers = {"content-type": kind, "content-disposition": disposition_of(path.name)}
    return Response(content, headers=headers)


ROUTES = (
    Route("POST", "/upload/image", post_image),
    Route("POST", "/upload/mask", post_mask),
    Route("GET", "/view", get_view),
)
