"""The interface of an object store, and checks of keys, content types and file names that fit folder, bucket and header."""

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

# The most that S3 takes in one PUT; a folder could hold more, but then a move to S3 would fail.
OBJECT_BYTES_MAX = 5 * 1024**3
# put and get are for documents. Media go by URL, and never through our memory.
MEMORY_BYTES_MAX = 256 * 1024**2
CHUNK_BYTES = 1024 * 1024
PART_BYTES_MIN = 5 * 1024**2
# What S3 allows for a presigned URL.
URL_SECONDS_MAX = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    size: int
    content_type: str


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object as a listing of the store shows it."""

    key: str
    modified_at: datetime


@dataclass(frozen=True, slots=True)
class PresignedUrl:
    """A URL for one object. The headers must be sent as they are: they are signed, too."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    method: Literal["PUT"] = "PUT"


class ObjectStore(Protocol):
    """Objects are replaced as a whole: a reader gets one version or the other, never a mixture."""

    @property
    def disk(self) -> str:
        """`local` or `s3`, as stored beside a file's key."""
        ...

    @property
    def outage(self) -> StoreOutage: ...

    async def put(self, key: str, data: bytes, content_type: str) -> None: ...

    async def get(self, key: str) -> bytes:
        """Returns the object; raises NotFound if there is none."""
        ...

    async def get_start(self, key: str, size: int) -> bytes:
        """Returns the first bytes, or all of a shorter object; raises NotFound if there is none."""
        ...

    def chunks(
        self, key: str, *, start: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        """Yields the object piece by piece, for callers that read it once without keeping it.

        `length`: of the part that begins at `start`, at least 1; None: all of it.
        """
        ...

    async def put_file(self, key: str, file: Path, content_type: str) -> None:
        """Stores a file, as `put` does, for what is too large for memory."""
        ...

    async def head(self, key: str) -> ObjectFacts | None: ...

    async def copy(
        self, key: str, target: str, content_type: str, *, size: int | None = None
    ) -> bool:
        """Copies the current bytes to another key, without passing them through our memory.

        Returns False, and copies nothing, if the size is not the one given; raises NotFound if
        there is none.
        """
        ...

    async def join(self, keys: Sequence[str], target: str, content_type: str) -> None:
        """Makes one object of several, in their order; raises NotFound if one is missing.

        Each but the last must have at least `PART_BYTES_MIN`, as S3 wants it.
        """
        ...

    async def delete(self, *keys: str) -> None:
        """Deletes the objects; missing ones are no error."""
        ...

    def keys(self, prefix: str) -> AsyncIterator[str]:
        """Yields all keys with the prefix, in no promised order."""
        ...

    def listed(self, prefix: str) -> AsyncIterator[ListedObject]:
        """Yields all objects with the prefix, each with the moment when it was last written."""
        ...

    async def url_to_get(self, key: str, *, seconds: int, filename: str | None = None) -> str:
        """Returns a URL to download; with a file name, a browser saves the object under it."""
        ...

    async def url_to_put(
        self, key: str, *, content_type: str, seconds: int, size: int | None = None
    ) -> PresignedUrl:
        """Returns a URL to upload; valid for this content type only and, when a size is given, for
        this size only.
        """
        ...

    async def check(self) -> None:
        """Raises the error that keeps the store from working, if any."""
        ...

    async def aclose(self) -> None: ...


KEY_BYTES_MAX = 1024  # S3's
PART_BYTES_MAX = 255  # what file systems take as one name
CONTENT_TYPE_CHARACTERS_MAX = 200
NAMELESS = "file"

_TOKEN = r"[A-Za-z0-9!#$&^_.+-]+"  # noqa: S105
_PARAMETER = rf'; ?{_TOKEN}=(?:{_TOKEN}|"[ !#-\[\]-~]*")'
_CONTENT_TYPE = re.compile(rf"{_TOKEN}/{_TOKEN}(?:{_PARAMETER})*")
# Control characters, and the backslash, which is a separator to some.
_NEVER = re.compile(r"[\x00-\x1f\x7f-\x9f\\]")


def checked_key(key: str) -> str:
    try:
        parts = [part.encode() for part in key.split("/")]
    except UnicodeEncodeError:
        raise InvalidInput("a key must be text that UTF-8 can hold", key=ascii(key)) from None
    if not all(parts) or b"." in parts or b".." in parts or _NEVER.search(key):
        raise InvalidInput(f"{key!r} can't be a key", key=ascii(key))
    if max(map(len, parts)) > PART_BYTES_MAX or len(key.encode()) > KEY_BYTES_MAX:
        raise InvalidInput(
            f"a key has at most {KEY_BYTES_MAX} bytes, and {PART_BYTES_MAX} between slashes",
            key=key,
        )
    return key


def checked_content_type(content_type: str) -> str:
    fits = len(content_type) <= CONTENT_TYPE_CHARACTERS_MAX
    if not fits or not _CONTENT_TYPE.fullmatch(content_type):
        raise InvalidInput(
            f"{content_type!r} is no content type such as image/png", field="content_type"
        )
    return content_type


def checked_seconds(seconds: int) -> int:
    if not 1 <= seconds <= URL_SECONDS_MAX:
        raise InvalidInput(
            f"a URL lives 1 to {URL_SECONDS_MAX} seconds, not {seconds}", field="seconds"
        )
    return seconds


def checked_size(size: int | None, *, size_max: int) -> int | None:
    if size is not None and not 0 <= size <= size_max:
        raise InvalidInput(f"an object has 0 to {size_max} bytes, not {size}", field="size")
    return size


def disposition(kind: str, filename: str) -> str:
    """Builds a Content-Disposition for old and new clients: RFC 6266 has them prefer `filename*`."""
    # Without signs that are not seen: one of them shows `gnp.exe` as `exe.png`.
    seen = "".join(each for each in filename if unicodedata.category(each) not in ("Cc", "Cf"))
    filename = seen or NAMELESS
    printable = re.sub(r"[^ -~]|[\"\\%]", "_", filename)
    encoded = quote(filename.encode(errors="replace"), safe="")
    if printable == filename:
        return f'{kind}; filename="{printable}"'
    return f"{kind}; filename=\"{printable}\"; filename*=UTF-8''{encoded}"
