"""Which bytes of an object go out, under which status. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


@dataclass(frozen=True, slots=True)
class Part:
    status: int
    start: int = 0
    length: int = 0

    def headers(self, size: int) -> dict[str, str]:
        if self.status == 206:
            return {"content-range": f"bytes {self.start}-{self.start + self.length - 1}/{size}"}
        return {"content-range": f"bytes */{size}"} if self.status == 416 else {}


def wanted(headers: Mapping[str, str], *, size: int, etag: str) -> Part:
    """One range is served; several, or what is no range, get the whole, as the standard allows."""
    if _names(headers.get("if-none-match", ""), etag):
        return Part(304)
    found = _RANGE.fullmatch(headers.get("range", ""))
    if found is None or found[0] == "bytes=-" or headers.get("if-range", etag) != etag:
        return Part(200, 0, size)
    first, last = found.groups()
    if not first:
        length = min(int(last), size)
        return Part(206, size - length, length) if length else Part(416)
    start, end = int(first), min(int(last or size), size - 1)
    if last and int(last) < start:
        return Part(200, 0, size)
    return Part(206, start, end - start + 1) if start <= end else Part(416)


def _names(etags: str, etag: str) -> bool:
    named = {each.strip().removeprefix("W/") for each in etags.split(",")}
    return bool(named & {"*", etag})
