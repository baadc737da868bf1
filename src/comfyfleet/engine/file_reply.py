"""Files over HTTP: whole, in part, or not at all because the client has them already."""

import asyncio
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import formatdate, parsedate_to_datetime
from pathlib import Path

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

CHUNK_BYTES = 256 * 1024
NANOSECONDS = 1_000_000_000

_RANGE = re.compile(r"bytes=(\d*)-(\d*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells one state of a file from another."""

    size: int
    modified_ns: int

    @property
    def etag(self) -> str:
        return f'"{self.modified_ns:x}-{self.size:x}"'

    @property
    def modified(self) -> int:
        return self.modified_ns // NANOSECONDS


@dataclass(frozen=True, slots=True)
class Plan:
    """Which bytes go out, under which status."""

    status: int
    start: int = 0
    length: int = 0


def plan(headers: Mapping[str, str], stamp: Stamp) -> Plan:
    """Preconditions first, then the range."""
    if (status := _precondition(headers, stamp)) is not None:
        return Plan(status)
    wanted = headers.get("range")
    if wanted is None or not _range_still_holds(headers, stamp):
        return Plan(200, 0, stamp.size)
    span = _span(wanted, stamp.size)
    return Plan(416) if span is None else Plan(206, *span)


def _precondition(headers: Mapping[str, str], stamp: Stamp) -> int | None:
    if "if-match" in headers:
        if not _names(headers["if-match"], stamp):
            return 412
    elif (before := _date(headers, "if-unmodified-since")) and stamp.modified > before:
        return 412
    if "if-none-match" in headers:
        return 304 if _names(headers["if-none-match"], stamp) else None
    since = _date(headers, "if-modified-since")
    return 304 if since is not None and stamp.modified <= since else None


def _names(etags: str, stamp: Stamp) -> bool:
    named = [etag.strip().removeprefix("W/") for etag in etags.split(",")]
    return "*" in named or stamp.etag in named


def _range_still_holds(headers: Mapping[str, str], stamp: Stamp) -> bool:
    date = _date(headers, "if-range")
    return date is None or stamp.modified <= date


def _date(headers: Mapping[str, str], name: str) -> float | None:
    try:
        return parsedate_to_datetime(headers[name]).timestamp()
    except (KeyError, ValueError):
        return None


def _span(wanted: str, size: int) -> tuple[int, int] | None:
    """Start and length of a single range, or None when it can't be satisfied."""
    found = _RANGE.fullmatch(wanted)
    if found is None or found[0] == "bytes=-":
        return None
    first, last = found.groups()
    if not first:
        start = max(size - int(last), 0)
        return (start, size - start) if start < size else None
    start = int(first)
    end = min(int(last), size - 1) if last else size - 1
    return (start, end - start + 1) if start <= end else None


class FileReply(Response):
    """A file as it lies on disk, read while it is sent."""

    def __init__(
        self, path: Path, request_headers: Mapping[str, str], headers: Mapping[str, str]
    ) -> None:
        found = path.stat()
        stamp = Stamp(found.st_size, found.st_mtime_ns)
        self._path = path
        self._plan = plan(request_headers, stamp)
        super().__init__(b"", self._plan.status, dict(headers))
        self.headers["content-length"] = str(self._plan.length)
        self._describe(stamp)

    def _describe(self, stamp: Stamp) -> None:
        status = self._plan.status
        if status in (200, 206, 304):
            self.headers["etag"] = stamp.etag
            self.headers["last-modified"] = formatdate(stamp.modified, usegmt=True)
        if status in (200, 206):
            self.headers["accept-ranges"] = "bytes"
        if status == 206:
            last = self._plan.start + self._plan.length - 1
            self.headers["content-range"] = f"bytes {self._plan.start}-{last}/{stamp.size}"
        if status == 416:
            self.headers["content-range"] = f"bytes */{stamp.size}"

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
