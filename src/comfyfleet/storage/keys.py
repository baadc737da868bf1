"""Keys, content types and file names, checked once: what passes fits a folder, a bucket and a header."""

import re
from urllib.parse import quote

from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.storage.model import URL_SECONDS_MAX

KEY_BYTES_MAX = 1024  # S3's
PART_BYTES_MAX = 255  # what file systems take as one name
CONTENT_TYPE_CHARACTERS_MAX = 200

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
    """A Content-Disposition for old and new clients: RFC 6266 has them prefer `filename*`."""
    printable = re.sub(r"[^ -~]|[\"\\%]", "_", filename)
    encoded = quote(filename.encode(errors="replace"), safe="")
    if printable == filename:
        return f'{kind}; filename="{printable}"'
    return f"{kind}; filename=\"{printable}\"; filename*=UTF-8''{encoded}"
