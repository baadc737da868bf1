"""Files in and out: uploads, and views of what lies in the three folders."""

import json
import mimetypes
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO, get_args

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import Response

from comfyfleet.engine import pictures, uploads
from comfyfleet.engine.door import Route
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.file_reply import FileReply
from comfyfleet.engine.node import FolderName, Folders
from comfyfleet.engine.replies import empty, json_reply
from comfyfleet.engine.requests import open_form
from comfyfleet.engine.trouble import Trouble

FOLDERS: tuple[FolderName, ...] = get_args(FolderName)

# Types that a browser would run or render: they are downloaded instead.
ACTIVE_TYPES = frozenset(
    {
        "application/ecmascript",
        "application/javascript",
        "application/x-javascript",
        "message/rfc822",
        "text/css",
        "text/html",
        "text/javascript",
    }
)


async def post_image(engine: Engine, request: Request) -> Response:
    async with open_form(request) as form:
        return await _store(engine.folders, form, uploads.save_bytes)


async def post_mask(engine: Engine, request: Request) -> Response:
    async with open_form(request) as form:
        return await _store(engine.folders, form, partial(save_mask, engine.folders, form))


async def _store(folders: Folders, form: FormData, save: uploads.Save) -> Response:
    folder = _folder_named(form.get("type", "input"))
    image = form.get("image")
    if not image:
        return empty(400)
    if not isinstance(image, UploadFile) or not image.filename:
        raise Trouble("image is no file with a name")
    subfolder = str(form.get("subfolder", ""))
    store = partial(
        uploads.store,
        image.file,
        folders.of(folder),
        subfolder=subfolder,
        name=image.filename,
        overwrite=form.get("overwrite") in ("true", "1"),
        save=save,
    )
    try:
        name = await run_in_threadpool(store)
    except uploads.OutsideFolder:
        return empty(400)
    return json_reply({"name": name, "subfolder": subfolder, "type": folder})


def _folder_named(name: object) -> FolderName:
    for folder in FOLDERS:
        if folder == name:
            return folder
    raise Trouble(f"there is no folder of type {name!r}")


def save_mask(folders: Folders, form: FormData, upload: BinaryIO, path: Path) -> None:
    """An original that can't be found is no error: nothing is written, as by ComfyUI."""
    original = _find_original(folders, form.get("original_ref"))
    if original is not None and original.is_file():
        pictures.put_mask(upload, original, path)


def _find_original(folders: Folders, reference: object) -> Path | None:
    try:
        named: dict[str, str] = json.loads(reference if isinstance(reference, str) else "")
        query = {key: value for key, value in named.items() if isinstance(value, str)}
        parent, name = resolve(folders, query)
    except (ValueError, TypeError, KeyError) as error:
        raise Trouble("original_ref must name a file") from error
    except Refused:
        return None
    return parent / name


class Refused(Exception):
    """A file that may not be looked at, with the status that says why."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def resolve(folders: Folders, query: Mapping[str, str]) -> tuple[Path, str]:
    """Folder and name that `filename`, `type` and `subfolder` lead to; they need not exist."""
    name, folder = _split_annotation(query["filename"], query.get("type", "output"))
    if not name or name.startswith("/") or ".." in name or folder not in FOLDERS:
        raise Refused(400)
    try:
        parent = uploads.place(folders.of(_folder_named(folder)), query.get("subfolder", ""), "")
    except uploads.OutsideFolder as error:
        raise Refused(403) from error
    return parent, name


def _split_annotation(name: str, folder: str) -> tuple[str, str]:
    """`a.png [temp]` names its folder itself; the space before the bracket goes, too."""
    for known in FOLDERS:
        if name.endswith(f"[{known}]"):
            return name[: -len(known) - 3], known
    return name, folder


async def get_view(engine: Engine, request: Request) -> Response:
    query = dict(request.query_params)
    if "filename" not in query:
        return empty(404)
    try:
        parent, name = resolve(engine.folders, query)
    except Refused as refused:
        return empty(refused.status)
    # A path in the name does not count; `subfolder` is for that.
    path = parent / os.path.basename(name)
    if not _is_file(path):
        return empty(404)
    return await show(path, query, request)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


async def show(path: Path, query: dict[str, str], request: Request) -> Response:
    channel = query.get("channel", "rgba")
    if "preview" in query:
        wanted = query["preview"], query.get("channel", "")
        content, kind = await run_in_threadpool(pictures.preview, path, *wanted)
    elif channel == "rgb":
        content, kind = await run_in_threadpool(pictures.without_alpha, path), "image/png"
    elif channel == "a":
        content, kind = await run_in_threadpool(pictures.alpha_only, path), "image/png"
    else:
        return FileReply(path, request.headers, file_headers(path.name))
    headers = {"content-type": kind, "content-disposition": _disposition(path.name)}
    return Response(content, headers=headers)


def file_headers(name: str) -> dict[str, str]:
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    disposition = _disposition(name)
    if _is_active(kind):
        kind, disposition = "application/octet-stream", f"attachment; {disposition}"
    return {
        "content-type": kind,
        "content-disposition": disposition,
        "x-content-type-options": "nosniff",
    }


def _disposition(name: str) -> str:
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    # Headers go out as Latin-1; ComfyUI's have names in UTF-8.
    return f'filename="{quoted}"'.encode().decode("latin-1")


def _is_active(kind: str) -> bool:
    return kind in ACTIVE_TYPES or kind.endswith(("+xml", "/xml"))


ROUTES = (
    Route("POST", "/upload/image", post_image),
    Route("POST", "/upload/mask", post_mask),
    Route("GET", "/view", get_view),
)
