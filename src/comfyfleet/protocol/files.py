"""Files over HTTP, as ComfyUI sends and accepts them: preconditions and ranges, headers by file
name, the file that a request to `/view` selects, and the fields of an upload."""

import json
import mimetypes
import posixpath
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from email.utils import formatdate, parsedate_to_datetime
from typing import NamedTuple

from starlette.datastructures import FormData, UploadFile
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from comfyfleet.errors import InvalidInput
from comfyfleet.protocol.payloads import UnforeseenInput
from comfyfleet.transport.ranges import ByteRange, file_etag, names_etag, select_range

NANOSECONDS = 1_000_000_000
FOLDERS = ("input", "output", "temp")

# Content types that a browser would execute or render. Files with these types are sent as
# downloads.
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


@dataclass(frozen=True, slots=True)
class FileStamp:
    """The size and modification time of a file, which identify its version."""

    size: int
    modified_ns: int

    @property
    def etag(self) -> str:
        return file_etag(self.size, self.modified_ns)

    @property
    def modified(self) -> int:
        return self.modified_ns // NANOSECONDS


def plan_reply(headers: Mapping[str, str], stamp: FileStamp) -> ByteRange:
    """Evaluates the preconditions first, and then the range."""
    if (status := _precondition(headers, stamp)) is not None:
        return ByteRange(status)
    range_header = headers.get("range")
    if range_header is None or not _range_still_holds(headers, stamp):
        return ByteRange(200, 0, stamp.size)
    return select_range(range_header, stamp.size, is_strict=True)


def _precondition(headers: Mapping[str, str], stamp: FileStamp) -> int | None:
    if "if-match" in headers:
        if not names_etag(headers["if-match"], stamp.etag):
            return 412
    elif (before := _date(headers, "if-unmodified-since")) is not None and stamp.modified > before:
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


class FileReply(StreamingResponse):
    """A response with the planned part of a file, which is read while it is sent. Without `chunks`,
    only the headers are sent."""

    def __init__(
        self,
        plan: ByteRange,
        stamp: FileStamp,
        headers: Mapping[str, str],
        chunks: AsyncIterator[bytes] | None = None,
    ) -> None:
        self._chunks = nothing() if chunks is None else chunks
        super().__init__(self._chunks, plan.status, dict(headers))
        self.headers["content-length"] = str(plan.length)
        if plan.status in (200, 206, 304):
            self.headers["etag"] = stamp.etag
            self.headers["last-modified"] = formatdate(stamp.modified, usegmt=True)
        if plan.status in (200, 206):
            self.headers["accept-ranges"] = "bytes"
        self.headers.update(plan.headers(stamp.size))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Close the file even if the client disconnects.
        async with aclosing(self._chunks):  # type: ignore[type-var]
            await super().__call__(scope, receive, send)


async def nothing() -> AsyncIterator[bytes]:
    none: tuple[bytes, ...] = ()
    for chunk in none:
        yield chunk


def file_headers(name: str) -> dict[str, str]:
    kind = type_by_name(name)
    disposition = disposition_of(name)
    if _is_active(kind):
        kind, disposition = "application/octet-stream", f"attachment; {disposition}"
    return {
        "content-type": kind,
        "content-disposition": disposition,
        "x-content-type-options": "nosniff",
    }


def type_by_name(name: str) -> str:
    return mimetypes.guess_type(name)[0] or "application/octet-stream"


def disposition_of(name: str) -> str:
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    # ComfyUI sends the name in UTF-8, but our framework encodes headers as Latin-1. This converts
    # the name so that the same bytes are sent.
    return f'filename="{quoted}"'.encode(errors="replace").decode("latin-1")


def _is_active(kind: str) -> bool:
    return kind in ACTIVE_TYPES or kind.endswith(("+xml", "/xml"))


class OutsideFolder(InvalidInput):
    code = "outside_folder"


_BASE = "/folder"


def path_inside(subfolder: str, name: str = "") -> str:
    """Returns the normalized path inside the folder. Raises OutsideFolder if the client's path
    leaves it."""
    path = posixpath.normpath(posixpath.join(_BASE, posixpath.normpath(subfolder), name))
    if path != _BASE and not path.startswith(f"{_BASE}/"):
        raise OutsideFolder(f"{name!r} is outside its folder", name=name)
    return path[len(_BASE) + 1 :]


class ViewRefused(Exception):
    """Raised if a file may not be viewed. Contains the HTTP status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class ViewedFile(NamedTuple):
    """The file that a request to `/view` selects."""

    folder: str
    subfolder: str
    name: str

    @property
    def base(self) -> str:
        """Returns the file name. A path in the name is ignored, because the folder belongs in
        `subfolder`."""
        return posixpath.basename(self.name)


def parse_view(query: Mapping[str, str]) -> ViewedFile:
    """Returns the file that `filename`, `type` and `subfolder` refer to. Raises ViewRefused, and
    KeyError if `filename` is missing."""
    name, folder = split_annotation(query["filename"], query.get("type", "output"))
    if not name or name.startswith("/") or ".." in name or folder not in FOLDERS:
        raise ViewRefused(400)
    return ViewedFile(folder, query.get("subfolder", ""), name)


def split_annotation(name: str, folder: str) -> tuple[str, str]:
    """Splits `a.png [temp]` into name and folder, without the space before the bracket."""
    for known in FOLDERS:
        if name.endswith(f"[{known}]"):
            return name[: -len(known) - 3], known
    return name, folder


class UploadForm(NamedTuple):
    """An upload with the fields that the client sent."""

    image: UploadFile
    name: str
    folder: str
    subfolder: str
    overwrites: bool


def parse_upload(form: FormData) -> UploadForm | None:
    """Parses an upload. Returns None if it has no file. Raises UnforeseenInput if ComfyUI itself
    would fail."""
    folder = form.get("type", "input")
    if not isinstance(folder, str) or folder not in FOLDERS:
        raise UnforeseenInput(f"unknown folder type {folder!r}")
    image = form.get("image")
    if not image:
        return None
    if not isinstance(image, UploadFile) or not image.filename:
        raise UnforeseenInput("image must be a file with a name")
    overwrites = form.get("overwrite") in ("true", "1")
    return UploadForm(image, image.filename, folder, str(form.get("subfolder", "")), overwrites)


def numbered_name(name: str, number: int) -> str:
    """Returns ComfyUI's name for a file whose own name is already used: `a (1).png`."""
    stem, extension = posixpath.splitext(name)
    return f"{stem} ({number}){extension}" if number else name


def parse_original(form: FormData) -> ViewedFile | None:
    """Returns the file that a mask belongs to, or None if its name is invalid."""
    reference = form.get("original_ref")
    try:
        fields: dict[str, str] = json.loads(reference if isinstance(reference, str) else "")
        return parse_view({key: value for key, value in fields.items() if isinstance(value, str)})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnforeseenInput("original_ref must name a file") from error
    except ViewRefused:
        return None
