"""What a file really is, told by its first bytes. Pure.

A name and a content type are what somebody says; a decoder goes by the bytes, and so do we.
"""

from collections.abc import Callable, Mapping

# Enough for every one of these; a first page of Ogg and the head of Matroska are the longest.
SNIFF_BYTES = 512

_ISO_BRANDS: Mapping[bytes, str] = {
    b"qt  ": "video/quicktime",
    b"avif": "image/avif",
    b"avis": "image/avif",
    b"heic": "image/heic",
    b"heix": "image/heic",
    b"mif1": "image/heic",
    b"msf1": "image/heic",
    b"M4A ": "audio/mp4",
    b"M4B ": "audio/mp4",
}
# How QuickTime began before it named its brand.
_OLD_QUICKTIME = frozenset({b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"})
# What a file of each type is called by its end.
ENDINGS: Mapping[str, str] = {
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/gif": ".gif",
    "image/webp": ".webp",
    "image/avif": ".avif",
    "image/heic": ".heic",
    "video/mp4": ".mp4",
    "video/quicktime": ".mov",
    "video/webm": ".webm",
    "video/x-matroska": ".mkv",
    "video/x-msvideo": ".avi",
    "video/ogg": ".ogv",
    "audio/mp4": ".m4a",
    "audio/webm": ".weba",
    "audio/x-matroska": ".mka",
    "audio/mpeg": ".mp3",
    "audio/wav": ".wav",
    "audio/flac": ".flac",
    "audio/ogg": ".ogg",
}


def sniffed(first: bytes) -> str | None:
    """The media type; none if it is nothing that we know."""
    found = (look(first) for look in _LOOKS)
    return next((media_type for media_type in found if media_type), None)


def _picture(first: bytes) -> str | None:
    if first.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if first.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if first.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    return None


def _riff(first: bytes) -> str | None:
    if not first.startswith((b"RIFF", b"RF64")):
        return None
    forms = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}
    return forms.get(first[8:12])


def _iso(first: bytes) -> str | None:
    box = first[4:8]
    if box == b"ftyp" and len(first) >= 12:
        return _ISO_BRANDS.get(first[8:12], "video/mp4")
    size = int.from_bytes(first[:4], "big")  # with its own eight bytes; 1: it stands behind them
    return "video/quicktime" if box in _OLD_QUICKTIME and (size == 1 or size >= 8) else None


def _matroska(first: bytes) -> str | None:
    if not first.startswith(b"\x1a\x45\xdf\xa3"):
        return None
    at = first.find(b"\x42\x82")  # DocType: an id, a length of one byte, the text
    if at < 0 or at + 2 >= len(first):
        return None
    length = first[at + 2] & 0x7F
    document = first[at + 3 : at + 3 + length].rstrip(b"\0")
    return {b"webm": "video/webm", b"matroska": "video/x-matroska"}.get(document)


def _ogg(first: bytes) -> str | None:
    if not first.startswith(b"OggS"):
        return None
    is_video = b"\x80theora" in first or b"BBCD\0" in first
    return "video/ogg" if is_video else "audio/ogg"


def _sound(first: bytes) -> str | None:
    if first.startswith(b"fLaC"):
        return "audio/flac"
    if first.startswith(b"ID3") and len(first) >= 10:
        return "audio/mpeg"
    return "audio/mpeg" if _is_mpeg_frame(first) else None


def _is_mpeg_frame(first: bytes) -> bool:
    """A frame header without any of the values that are reserved; AAC has another layer."""
    if len(first) < 4 or first[0] != 0xFF or first[1] & 0xE0 != 0xE0:
        return False
    version, layer = first[1] >> 3 & 3, first[1] >> 1 & 3
    bitrate, rate = first[2] >> 4, first[2] >> 2 & 3
    return version != 1 and layer != 0 and bitrate not in (0, 15) and rate != 3


_LOOKS: tuple[Callable[[bytes], str | None], ...] = (
    _picture,
    _riff,
    _iso,
    _matroska,
    _ogg,
    _sound,
)
