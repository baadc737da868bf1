"""The interface of an object store, and checks that keys, content types and file names are valid in
folders, buckets and headers."""

import re
import unicodedata
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import quote

from comfyfleet.errors import InvalidInput
from comfyfleet.server.storage.outage import StoreOutage

# S3's limit for a single PUT. A folder could store more, but then a move to S3 would fail.
OBJECT_BYTES_MAX = 5 * 1024**3
# Limit for put and get, which are for documents. Media are transferred by URL, and never through
# the control plane's memory.
MEMORY_BYTES_MAX = 256 * 1024**2
CHUNK_BYTES = 1024 * 1024
PART_BYTES_MIN = 5 * 1024**2
# S3's limit for presigned URLs.
URL_SECONDS_MAX = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    size: int
    content_type: str


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object in a listing of the store."""

    key: str
    modified_at: datetime


@dataclass(frozen=True, slots=True)
class PresignedUrl:
    """A URL for one object. The headers must be sent unchanged, because they are signed as well."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    method: Literal["PUT"] = "PUT"


class ObjectStore(Protocol):
    """A store of objects. Objects are replaced as a whole, so a reader gets one version or the
    other, but never a mixture."""

    @property
    def disk(self) -> str:
        """`local` or `s3`, which is stored together with a file's key."""
        ...

    @property
    def outage(self) -> StoreOutage: ...

    async def put(self, key: str, data: bytes, content_type: str) -> None: ...

    async def get(self, key: str) -> bytes:
        """Returns the object. Raises NotFound if it doesn't exist."""
        ...

    async def get_start(self, key: str, size: int) -> bytes:
        """Returns the first bytes, or all bytes of a shorter object. Raises NotFound if it doesn't
        exist."""
        ...

    def chunks(
        self, key: str, *, start: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        """Yields the object in chunks, for callers that read it once without storing it.

        `length` is the length of the part that begins at `start`, at least 1. None means the whole
        object."""
        ...

    async def put_file(self, key: str, file: Path, content_type: str) -> None:
        """Stores a file like `put`, for content that is too large for memory."""
        ...

    async def head(self, key: str) -> ObjectFacts | None: ...

    async def copy(
        self, key: str, target: str, content_type: str, *, size: int | None = None
    ) -> bool:
        """Copies the current bytes to another key, without passing them through the control plane's
        memory.

        Returns False, and copies nothing, if the size differs from the given one. Raises NotFound
        if the object doesn't exist."""
        ...

    async def join(self, keys: Sequence[str], target: str, content_type: str) -> None:
        """Concatenates several objects into one. Raises NotFound if one is missing.

        Each except the last must have at least `PART_BYTES_MIN` bytes, as S3 requires."""
        ...

    async def delete(self, *keys: str) -> None:
        """Deletes the objects. Missing objects aren't an error."""
        ...

    def keys(self, prefix: str) -> AsyncIterator[str]:
        """Yields all keys with the prefix, in no guaranteed order."""
        ...

    def listed(self, prefix: str) -> AsyncIterator[ListedObject]:
        """Yields all objects with the prefix, each with the time of its last write."""
        ...

    async def url_to_get(self, key: str, *, seconds: int, filename: str | None = None) -> str:
        """Returns a download URL. With a file name, a browser saves the object under that name."""
        ...

    async def url_to_put(
        self, key: str, *, content_type: str, seconds: int, size: int | None = None
    ) -> PresignedUrl:
        """Returns an upload URL. It is valid only for this content type and, if a size is given,
        only for this size."""
        ...

    async def check(self) -> None:
        """Raises the error that prevents the store from working, if any."""
        ...

    async def aclose(self) -> None: ...


KEY_BYTES_MAX = 1024  # S3's limit
PART_BYTES_MAX = 255  # the limit of file systems for one name
CONTENT_TYPE_CHARACTERS_MAX = 200
NAMELESS = "file"

_TOKEN = r"[A-Za-z0-9!#$&^_.+-]+"  # noqa: S105
_PARAMETER = rf'; ?{_TOKEN}=(?:{_TOKEN}|"[ !#-\[\]-~]*")'
_CONTENT_TYPE = re.compile(rf"{_TOKEN}/{_TOKEN}(?:{_PARAMETER})*")
# Characters that keys can't contain: control characters, and the backslash, which some systems
# treat as a separator.
_NEVER = re.compile(r"[\x00-\x1f\x7f-\x9f\\]")


def checked_key(key: str) -> str:
    try:
        parts = [part.encode() for part in key.split("/")]
    except UnicodeEncodeError:
        raise InvalidInput("a key must be valid UTF-8 text", key=ascii(key)) from None
    if not all(parts) or b"." in parts or b".." in parts or _NEVER.search(key):
        raise InvalidInput(f"{key!r} isn't a valid key", key=ascii(key))
    if max(map(len, parts)) > PART_BYTES_MAX or len(key.encode()) > KEY_BYTES_MAX:
        raise InvalidInput(
            f"a key can have at most {KEY_BYTES_MAX} bytes, and {PART_BYTES_MAX} between slashes",
            key=key,
        )
    return key


def checked_content_type(content_type: str) -> str:
    fits = len(content_type) <= CONTENT_TYPE_CHARACTERS_MAX
    if not fits or not _CONTENT_TYPE.fullmatch(content_type):
        raise InvalidInput(
            f"{content_type!r} isn't a content type such as image/png", field="content_type"
        )
    return content_type


def checked_seconds(seconds: int) -> int:
    if not 1 <= seconds <= URL_SECONDS_MAX:
        raise InvalidInput(
            f"a URL must be valid for 1 to {URL_SECONDS_MAX} seconds, not {seconds}",
            field="seconds",
        )
    return seconds


def checked_size(size: int | None, *, size_max: int) -> int | None:
    if size is not None and not 0 <= size <= size_max:
        raise InvalidInput(f"an object must have 0 to {size_max} bytes, not {size}", field="size")
    return size


def disposition(kind: str, filename: str) -> str:
    """Builds a Content-Disposition header for old and new clients. According to RFC 6266, new
    clients prefer `filename*`."""
    # Remove invisible characters. One of them displays `gnp.exe` as `exe.png`.
    seen = "".join(
        character for character in filename if unicodedata.category(character) not in ("Cc", "Cf")
    )
    filename = seen or NAMELESS
    printable = re.sub(r"[^ -~]|[\"\\%]", "_", filename)
    encoded = quote(filename.encode(errors="replace"), safe="")
    if printable == filename:
        return f'{kind}; filename="{printable}"'
    return f"{kind}; filename=\"{printable}\"; filename*=UTF-8''{encoded}"
