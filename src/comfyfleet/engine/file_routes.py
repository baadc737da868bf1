"""Routes for files: uploads, views of the three folders (whole or in ranges), and previews of pictures."""

import asyncio
import json
import mimetypes
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate, parsedate_to_datetime
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar, get_args

import PIL.Image
from PIL.PngImagePlugin import PngImageFile, PngInfo
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.node import FolderName, Folders, require_small
from comfyfleet.errors import InvalidInput, LimitExceeded
from comfyfleet.media import measure_picture
from comfyfleet.protocol.http import Route, empty_reply, json_reply, open_form
from comfyfleet.protocol.payloads import UnforeseenInput
from comfyfleet.transport.ranges import ByteRange, file_etag, names_etag, select_range

CHUNK_BYTES = 256 * 1024
NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Identifies one state of a file."""

    size: int
    modified_ns: int

    @property
    def etag(self) -> str:
        return file_etag(self.size, self.modified_ns)

    @property
    def modified(self) -> int:
        return self.modified_ns // NANOSECONDS


def plan_reply(headers: Mapping[str, str], stamp: FileStamp) -> ByteRange:
    """Evaluates the preconditions first, then the range."""
    if (status := _precondition(headers, stamp)) is not None:
        return ByteRange(status)
    wanted = headers.get("range")
    if wanted is None or not _range_still_holds(headers, stamp):
        return ByteRange(200, 0, stamp.size)
    return select_range(wanted, stamp.size, is_strict=True)


def _precondition(headers: Mapping[str, str], stamp: FileStamp) -> int | None:
    if "if-match" in headers:
        if not names_etag(headers["if-match"], stamp.etag):
            return 412
    elif (before := _date(headers, "if-unmodified-since")) and stamp.modified > before:
        return 412
    if "if-none-match" in headers:
        return 304 if names_etag(headers["if-none-match"], stamp.etag) else None
    since = _date(headers, "if-modified-since")
    return 304 if since is not None and stamp.modified <= since else None


def _range_still_holds(headers: Mapping[str, str], stamp: FileStamp) -> bool:
    date = _date(headers, "if-range")
    return date is None or stamp.modified <= date


def _date(headers: Mapping[str, str], name: str) -> float | None:
    try:
        return parsedate_to_datetime(headers[name]).timestamp()
    except (KeyError, ValueError):
        return None


class FileReply(Response):
    """Streams a file from disk."""

    def __init__(
        self, path: Path, request_headers: Mapping[str, str], headers: Mapping[str, str]
    ) -> None:
        found = path.stat()
        stamp = FileStamp(found.st_size, found.st_mtime_ns)
        self._path = path
        self._plan = plan_reply(request_headers, stamp)
        super().__init__(b"", self._plan.status, dict(headers))
        self.headers["content-length"] = str(self._plan.length)
        self._describe(stamp)

    def _describe(self, stamp: FileStamp) -> None:
        status = self._plan.status
        if status in (200, 206, 304):
            self.headers["etag"] = stamp.etag
            self.headers["last-modified"] = formatdate(stamp.modified, usegmt=True)
        if status in (200, 206):
            self.headers["accept-ranges"] = "bytes"
        self.headers.update(self._plan.headers(stamp.size))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        if scope["method"] != "HEAD" and self._plan.length:
            await self._send_bytes(send)
        await send({"type": "http.response.body", "body": b""})

    async def _send_bytes(self, send: Send) -> None:
        with self._path.open("rb") as file:
            file.seek(self._plan.start)
            left = self._plan.length
            while left > 0 and (chunk := await _read(file.fileno(), min(left, CHUNK_BYTES))):
                left -= len(chunk)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def _read(descriptor: int, size: int) -> bytes:
    # A small file is in the page cache: a thread would cost more than the read.
    if size < CHUNK_BYTES:
        return os.read(descriptor, size)
    return await asyncio.to_thread(os.read, descriptor, size)


COPY_BYTES = 1024 * 1024


class SaveUpload(Protocol):
    """Writes an upload to its path."""

    def __call__(self, upload: BinaryIO, path: Path) -> None: ...


class OutsideFolder(InvalidInput):
    code = "outside_folder"


def upload_path(folder: Path, subfolder: str, name: str) -> Path:
    """The path for a client's folder and name. Raises OutsideFolder if it leaves the folder."""
    base = os.path.abspath(folder)
    path = os.path.abspath(os.path.join(base, os.path.normpath(subfolder), name))
    if not Path(path).is_relative_to(base):
        raise OutsideFolder(f"{name!r} is outside its folder", name=name)
    return Path(path)


def store_upload(
    upload: BinaryIO, folder: Path, *, subfolder: str, name: str, overwrite: bool, save: SaveUpload
) -> str:
    """Saves under the name, or a numbered one if a file with other bytes has it. Returns the name."""
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
    """A name that is free, or None if a file with the same bytes has it and nothing must be written."""
    if overwrite:
        return name, path, False
    stem, extension = os.path.splitext(name)
    number, candidate = 0, path
    while candidate.exists():
        if _same_bytes(upload, candidate):
            return _numbered(stem, number, extension), candidate, True
        number += 1
        candidate = path.parent / os.path.basename(_numbered(stem, number, extension))
    return _numbered(stem, number, extension), candidate, False


def _numbered(stem: str, number: int, extension: str) -> str:
    return f"{stem} ({number}){extension}" if number else f"{stem}{extension}"


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


T = TypeVar("T")

PREVIEW_QUALITY = 90
MASK_COMPRESSION = 4


def picture_preview(path: Path, wanted: str, channel: str) -> tuple[bytes, str]:
    """Encodes `webp;90` or `jpeg;q`; any other format is webp. Returns the bytes and the content type."""
    kind, _, _ = wanted.partition(";")
    if kind not in ("webp", "jpeg") or "a" in channel:
        kind = "webp"
    last = wanted.split(";")[-1]
    quality = int(last) if last.isdecimal() else PREVIEW_QUALITY

    def encode(picture: PIL.Image.Image) -> bytes:
        flat = kind == "jpeg" or channel == "rgb"
        shown = picture.convert("RGB") if flat else picture
        buffer = BytesIO()
        shown.save(buffer, format=kind, quality=quality)
        return buffer.getvalue()

    return _with_picture(path, encode), f"image/{kind}"


def without_alpha(path: Path) -> bytes:
    return _with_picture(path, lambda picture: _png(picture.convert("RGB")))


def alpha_only(path: Path) -> bytes:
    """A black picture with the alpha of the original; without alpha it is opaque."""

    def encode(picture: PIL.Image.Image) -> bytes:
        opaque = PIL.Image.new("L", picture.size, 255)
        alpha = picture.getchannel("A") if picture.mode == "RGBA" else opaque
        shown = PIL.Image.new("RGBA", picture.size)
        shown.putalpha(alpha)
        return _png(shown)

    return _with_picture(path, encode)


def put_mask(mask: BinaryIO, original: Path, path: Path) -> None:
    """Writes the original with the alpha of the mask, keeping its text metadata."""

    def combine(picture: PIL.Image.Image) -> None:
        texts = PngInfo()
        for key, value in picture.text.items() if isinstance(picture, PngImageFile) else ():
            texts.add_text(key, value)
        combined = picture.convert("RGBA")
        with PIL.Image.open(mask) as shape:
            require_small(shape.size)
            combined.putalpha(shape.convert("RGBA").getchannel("A"))
        combined.save(path, compress_level=MASK_COMPRESSION, pnginfo=texts)

    _with_picture(original, combine)


def _png(picture: PIL.Image.Image) -> bytes:
    buffer = BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def _with_picture(path: Path, use: Callable[[PIL.Image.Image], T]) -> T:
    try:
        require_small(measure_picture(path))
        with PIL.Image.open(path) as picture:
            require_small(picture.size)
            return use(picture)
    except (LimitExceeded, OSError, ValueError, SyntaxError, KeyError) as error:
        raise UnforeseenInput(f"{path.name} can't be shown as a picture: {error}") from error


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
        return await _store(engine.folders, form, save_bytes)


async def post_mask(engine: Engine, request: Request) -> Response:
    async with open_form(request) as form:
        return await _store(engine.folders, form, partial(save_mask, engine.folders, form))


async def _store(folders: Folders, form: FormData, save: SaveUpload) -> Response:
    folder = _folder_named(form.get("type", "input"))
    image = form.get("image")
    if not image:
        return empty_reply(400)
    if not isinstance(image, UploadFile) or not image.filename:
        raise UnforeseenInput("image is no file with a name")
    subfolder = str(form.get("subfolder", ""))
    store = partial(
        store_upload,
        image.file,
        folders.of(folder),
        subfolder=subfolder,
        name=image.filename,
        overwrite=form.get("overwrite") in ("true", "1"),
        save=save,
    )
    try:
        name = await run_in_threadpool(store)
    except OutsideFolder:
        return empty_reply(400)
    return json_reply({"name": name, "subfolder": subfolder, "type": folder})


def _folder_named(name: object) -> FolderName:
    for folder in FOLDERS:
        if folder == name:
            return folder
    raise UnforeseenInput(f"there is no folder of type {name!r}")


def save_mask(folders: Folders, form: FormData, upload: BinaryIO, path: Path) -> None:
    """Without the original it writes nothing and raises nothing, as ComfyUI does."""
    original = _find_original(folders, form.get("original_ref"))
    if original is not None and original.is_file():
        put_mask(upload, original, path)


def _find_original(folders: Folders, reference: object) -> Path | None:
    try:
        named: dict[str, str] = json.loads(reference if isinstance(reference, str) else "")
        query = {key: value for key, value in named.items() if isinstance(value, str)}
        parent, name = resolve_view(folders, query)
    except (ValueError, TypeError, KeyError) as error:
        raise UnforeseenInput("original_ref must name a file") from error
    except ViewRefused:
        return None
    return parent / name


class ViewRefused(Exception):
    """A file that may not be viewed, with the HTTP status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def resolve_view(folders: Folders, query: Mapping[str, str]) -> tuple[Path, str]:
    """The folder and name for `filename`, `type` and `subfolder`; they need not exist."""
    name, folder = _split_annotation(query["filename"], query.get("type", "output"))
    if not name or name.startswith("/") or ".." in name or folder not in FOLDERS:
        raise ViewRefused(400)
    try:
        parent = upload_path(folders.of(_folder_named(folder)), query.get("subfolder", ""), "")
    except OutsideFolder as error:
        raise ViewRefused(403) from error
    return parent, name


def _split_annotation(name: str, folder: str) -> tuple[str, str]:
    """Splits `a.png [temp]` into name and folder, without the space before the bracket."""
    for known in FOLDERS:
        if name.endswith(f"[{known}]"):
            return name[: -len(known) - 3], known
    return name, folder


async def get_view(engine: Engine, request: Request) -> Response:
    query = dict(request.query_params)
    if "filename" not in query:
        return empty_reply(404)
    try:
        parent, name = resolve_view(engine.folders, query)
    except ViewRefused as refused:
        return empty_reply(refused.status)
    # A path in the name does not count; `subfolder` is for that.
    path = parent / os.path.basename(name)
    if not _is_file(path):
        return empty_reply(404)
    return await reply_with_file(path, query, request)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


async def reply_with_file(path: Path, query: dict[str, str], request: Request) -> Response:
    channel = query.get("channel", "rgba")
    if "preview" in query:
        wanted = query["preview"], query.get("channel", "")
        content, kind = await run_in_threadpool(picture_preview, path, *wanted)
    elif channel == "rgb":
        content, kind = await run_in_threadpool(without_alpha, path), "image/png"
    elif channel == "a":
        content, kind = await run_in_threadpool(alpha_only, path), "image/png"
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
