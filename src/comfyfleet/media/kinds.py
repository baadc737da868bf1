"""Media types by one name each, and whether a file is what it is said to be. Pure."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.kernel.filetypes import ENDINGS, SNIFF_BYTES, sniffed

__all__ = [
    "SNIFF_BYTES",
    "MediaKind",
    "canonical",
    "check_claim",
    "is_really",
    "kind_of",
    "sniffed",
]

MediaKind: TypeAlias = Literal["image", "video", "audio"]

_ALIASES: Mapping[str, str] = {
    "image/jpg": "image/jpeg",
    "image/pjpeg": "image/jpeg",
    "image/x-png": "image/png",
    "image/heif": "image/heic",
    "video/mov": "video/quicktime",
    "video/x-m4v": "video/mp4",
    "video/mkv": "video/x-matroska",
    "video/matroska": "video/x-matroska",
    "video/avi": "video/x-msvideo",
    "video/msvideo": "video/x-msvideo",
    "audio/wave": "audio/wav",
    "audio/x-wav": "audio/wav",
    "audio/vnd.wave": "audio/wav",
    "audio/mp3": "audio/mpeg",
    "audio/x-mp3": "audio/mpeg",
    "audio/x-flac": "audio/flac",
    "audio/opus": "audio/ogg",
    "audio/x-m4a": "audio/mp4",
    "audio/m4a": "audio/mp4",
    "application/ogg": "audio/ogg",
}
# The same container with sound alone in it, which the first bytes don't tell.
_SOUND_ALONE: Mapping[str, str] = {
    "audio/mp4": "video/mp4",
    "audio/webm": "video/webm",
    "audio/x-matroska": "video/x-matroska",
}


def canonical(media_type: str) -> str:
    """Without parameters, in lower case, by the name that we use."""
    bare = media_type.partition(";")[0].strip().lower()
    return _ALIASES.get(bare, bare)


def extension_of(media_type: str) -> str | None:
    """With its dot; none of what is no media."""
    return ENDINGS.get(canonical(media_type))


def kind_of(media_type: str) -> MediaKind | None:
    family = canonical(media_type).partition("/")[0]
    kinds: tuple[MediaKind, ...] = ("image", "video", "audio")
    return next((kind for kind in kinds if kind == family), None)


def is_really(claimed: str, first: bytes) -> bool:
    wanted, found = canonical(claimed), sniffed(first)
    return found is not None and found in (wanted, _SOUND_ALONE.get(wanted))


def check_claim(claimed: str, first: bytes) -> str:
    """The media type by our name, if the bytes bear it out."""
    if not is_really(claimed, first):
        found = sniffed(first) or "no media that we know"
        raise InvalidInput(
            f"the file is said to be {canonical(claimed)[:100]}, and is {found}",
            field="content_type",
            found=sniffed(first),
        )
    return canonical(claimed)
