"""HTTP byte ranges: the bytes of a file that a request selects, and the headers that describe
them."""

import re
from dataclasses import dataclass

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The bytes to send, and the status of the response."""

    status: int
    start: int = 0
    length: int = 0

    def headers(self, size: int) -> dict[str, str]:
        if self.status == 206:
            return {"content-range": f"bytes {self.start}-{self.start + self.length - 1}/{size}"}
        return {"content-range": f"bytes */{size}"} if self.status == 416 else {}


def select_range(text: str, size: int, *, is_strict: bool = False) -> ByteRange:
    """Parses a Range header. Several ranges or an invalid one select the whole file, or result in a
    416 if `is_strict`."""
    match = _RANGE.fullmatch(text)
    first, last = match.groups() if match else ("", "")
    if not (first or last) or (first and last and int(last) < int(first)):
        return ByteRange(416) if is_strict else ByteRange(200, 0, size)
    start = int(first) if first else max(size - int(last), 0)
    end = min(int(last), size - 1) if first and last else size - 1
    return ByteRange(206, start, end - start + 1) if start <= end else ByteRange(416)


def file_etag(size: int, modified_ns: int) -> str:
    return f'"{modified_ns:x}-{size:x}"'


def names_etag(etags: str, etag: str) -> bool:
    """Checks whether an If-Match or If-None-Match header contains this entity tag, weak or not."""
    return bool({item.strip().removeprefix("W/") for item in etags.split(",")} & {"*", etag})
