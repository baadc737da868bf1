"""What a store of objects promises, whether it is a folder or a bucket."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol

# The most that S3 takes in one PUT; a folder could hold more, but then a move to S3 would fail.
OBJECT_BYTES_MAX = 5 * 1024**3
# put and get are for documents. Media go by URL, and never through our memory.
MEMORY_BYTES_MAX = 256 * 1024**2
CHUNK_BYTES = 1024 * 1024
# What S3 allows for a presigned URL.
URL_SECONDS_MAX = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    size: int
    content_type: str


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as a listing of the store shows it."""

    key: str
    modified_at: datetime


@dataclass(frozen=True, slots=True)
class Presigned:
    """How to deliver one object. The headers must be sent as they are: they are signed, too."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    method: Literal["PUT"] = "PUT"


class ObjectStore(Protocol):
    """Objects are replaced as a whole: a reader gets one version or the other, never a mixture."""

    @property
    def disk(self) -> str:
        """`local` or `s3`, as it is kept beside a file's key."""
        ...

    async def put(self, key: str, data: bytes, content_type: str) -> None: ...

    async def get(self, key: str) -> bytes:
        """NotFound if there is none."""
        ...

    async def get_start(self, key: str, size: int) -> bytes:
        """The first bytes, or all of a shorter object. NotFound if there is none."""
        ...

    def chunks(self, key: str) -> AsyncIterator[bytes]:
        """The whole, a piece at a time, for whoever reads it once and keeps none of it."""
        ...

    async def put_file(self, key: str, file: Path, content_type: str) -> None:
        """As `put`, for what is too large for memory."""
        ...

    async def head(self, key: str) -> ObjectFacts | None: ...

    async def copy(
        self, key: str, target: str, content_type: str, *, size: int | None = None
    ) -> bool:
        """The bytes as they are now under another key too, without a way through our memory.

        False: nothing was copied, as it has another size than the one given. NotFound if there is none.
        """
        ...

    async def delete(self, *keys: str) -> None:
        """No error if there is none."""
        ...

    def keys(self, prefix: str) -> AsyncIterator[str]:
        """All keys that begin so, in no promised order."""
        ...

    def listed(self, prefix: str) -> AsyncIterator[Listed]:
        """The same, each with the moment when it was last written."""
        ...

    async def url_to_get(self, key: str, *, seconds: int, filename: str | None = None) -> str:
        """With a file name, a browser saves under it instead of showing the object."""
        ...

    async def url_to_put(
        self, key: str, *, content_type: str, seconds: int, size: int | None = None
    ) -> Presigned:
        """Holds for this content type only and, when a size is given, for this size only."""
        ...

    async def check(self) -> None:
        """Raises what keeps the store from working."""
        ...

    async def aclose(self) -> None: ...
