"""Whether bytes are a whole picture, told without decoding it. Pure.

Decoders are not always installed where the loop runs; a file that ends too early, or is something
else altogether, shows without one.
"""

import zlib

from comfyfleet.media.kinds import SNIFF_BYTES, kind_of, sniffed

PICTURE_BYTES_MAX = 256 * 1024**2
_PNG_HEAD = 8
_ENDINGS = {"image/jpeg": b"\xff\xd9", "image/gif": b";"}
# Some writers pad a JPEG or GIF behind its end.
_PADDING = b"\0\n\r "


def problem_with_picture(data: bytes) -> str | None:
    """Why it can't be shown; none if it can, as far as its structure tells."""
    if not data:
        return "it is empty"
    found = sniffed(data[:SNIFF_BYTES])
    if found is None:
        return "it is no picture that we know"
    if kind_of(found) != "image":
        return f"it is {found}, no picture"
    if found == "image/png":
        return _png_problem(data)
    if found == "image/webp":
        size = int.from_bytes(data[4:8], "little") + 8
        return "it ends too early" if len(data) < size else None
    ending = _ENDINGS.get(found)
    if ending and not data.rstrip(_PADDING).endswith(ending):
        return "it ends too early"
    return None


def _png_problem(data: bytes) -> str | None:
    """Each part carries its own checksum; the last one is IEND."""
    at, has_pixels = _PNG_HEAD, False
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        kind, end = data[at + 4 : at + 8], at + 12 + length
        if end > len(data):
            break
        if zlib.crc32(data[at + 4 : end - 4]) != int.from_bytes(data[end - 4 : end], "big"):
            return f"its part {kind!r} is damaged"
        has_pixels |= kind == b"IDAT"
        if kind == b"IEND":
            return None if has_pixels else "it has no pixels"
        at = end
    return "it ends too early"
