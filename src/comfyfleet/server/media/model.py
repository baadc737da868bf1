"""Stored files with their keys, media items of users, and media types by one canonical name each. Pure."""

import base64
import re
import secrets
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID, uuid5

from comfyfleet.api.media import MediaKind as MediaKind
from comfyfleet.api.media import MediaStatus as MediaStatus
from comfyfleet.errors import InvalidInput
from comfyfleet.media import ENDINGS, SNIFF_BYTES, sniff_type

FILENAME_CHARACTERS_MAX = 300
SAFE_NAME_BYTES_MAX = 150
SUFFIX_BYTES_MAX = 20
NAMELESS = "file"
CONTENT_HASH = re.compile(r"[0-9a-f]{64}")
_ALLOWED = " .-_()[]+,=@~"


@dataclass(frozen=True, slots=True)
class File:
    """A stored file, or an announced upload, whose size and hash are None until its bytes were
    checked."""

    id: UUID
    tenant_id: UUID
    disk: str  # local or s3
    path: str  # the key in object storage; no two files share one
    filename: str  # as its owner named it
    mime_type: str
    created_at: datetime
    user_id: UUID | None = None
    size: int | None = None
    content_hash: str | None = None  # BLAKE3 as 64 hexadecimal digits, without any prefix
    metadata: Mapping[str, Any] = field(default_factory=dict)
    checked_at: datetime | None = None  # when its bytes were looked at
    kept_from: datetime | None = None  # its retention counts from here; None: from created_at

    @property
    def is_announced(self) -> bool:
        return self.size is None

    @property
    def object_keys(self) -> tuple[str, str]:
        """Its object, and its small picture, if one was made: both go when it goes."""
        return self.path, small_key(self.path)


def check_file(file: File) -> File:
    if file.size is not None and file.size < 0:
        raise InvalidInput(f"a file can't have {file.size} bytes", field="size")
    if not file.filename or len(file.filename) > FILENAME_CHARACTERS_MAX:
        raise InvalidInput(
            f"a file name has 1 to {FILENAME_CHARACTERS_MAX} characters", field="filename"
        )
    if file.content_hash is not None:
        check_hash(file.content_hash)
    return file


def check_hash(content_hash: str) -> str:
    if not CONTENT_HASH.fullmatch(content_hash):
        raise InvalidInput(
            "a content hash is BLAKE3, written as 64 hexadecimal digits in lower case",
            field="content_hash",
        )
    return content_hash


def output_key(tenant_id: UUID, job_id: UUID, delivery: UUID, name: str) -> str:
    """Returns an upload key for an output. `delivery` is unique per lease, so a late worker
    overwrites nothing."""
    suffix = PurePosixPath(safe_name(name)).suffix
    # JSON may contain lone surrogates, which can't be encoded.
    plain = name.encode(errors="backslashreplace").decode()
    return f"tenants/{tenant_id}/ai-jobs/{job_id}/output-{uuid5(delivery, plain)}{suffix}"


def kept_output_key(tenant_id: UUID, job_id: UUID, file_id: UUID, suffix: str) -> str:
    """Returns the final key of an output; no upload URL for it exists, so nobody can overwrite it."""
    return f"tenants/{tenant_id}/ai-jobs/{job_id}/{file_id}{suffix}"


_OUTPUT_KEY = re.compile(r"tenants/[0-9a-f-]{36}/ai-jobs/(?P<job>[0-9a-f-]{36})/")


def job_in_key(key: str) -> UUID | None:
    """Returns the job that made the object; None for uploads."""
    found = _OUTPUT_KEY.match(key)
    try:
        return UUID(found["job"]) if found else None
    except ValueError:
        return None


def upload_key(tenant_id: UUID, upload_id: UUID, name: str) -> str:
    return f"tenants/{tenant_id}/uploads/{upload_id}/{safe_name(name)}"


def part_key(key: str, number: int) -> str:
    """Returns the key of one part of an upload; beside the upload's folder, as a name may be any."""
    return f"{key.rpartition('/')[0]}.parts/{number:05d}"


def stored_key(tenant_id: UUID, file_id: UUID, version: UUID, suffix: str) -> str:
    """Returns the final key of an upload; no upload URL for it exists, so nobody can overwrite it."""
    return f"tenants/{tenant_id}/files/{file_id}/{version}{suffix}"


_SMALL_SUFFIX = ".small.webp"


def small_key(key: str) -> str:
    """Returns the key of the small picture of an object."""
    return f"{key}{_SMALL_SUFFIX}"


def owner_of_small(key: str) -> str:
    """Returns the key of the object whose small picture this is; the key itself if it is none."""
    return key.removesuffix(_SMALL_SUFFIX)


def replace_suffix(filename: str, suffix: str) -> str:
    """Replaces the suffix of a file name."""
    stem, dot, ending = filename.rpartition(".")
    is_ending = dot and 0 < len(ending) <= SUFFIX_BYTES_MAX and "/" not in ending
    return f"{(stem if is_ending and stem else filename)[: FILENAME_CHARACTERS_MAX - 20]}{suffix}"


def safe_name(name: str) -> str:
    """Returns the last part of a path with only characters that are safe in file systems, URLs and
    shells; keeps the suffix."""
    last = re.split(r"[/\\]", unicodedata.normalize("NFC", name))[-1]
    kept = "".join(_safe(character) for character in last).strip(" .")
    stem, dot, suffix = kept.rpartition(".")
    if not dot or not stem.strip(" .") or len(suffix.encode()) > SUFFIX_BYTES_MAX:
        stem, dot, suffix = kept, "", ""
    room = SAFE_NAME_BYTES_MAX - len(f"{dot}{suffix}".encode())
    return f"{_truncate(stem, room).strip(' .') or NAMELESS}{dot}{suffix}"


def _safe(character: str) -> str:
    kind = unicodedata.category(character)
    if kind[0] == "C":  # control characters, direction marks, surrogates
        return ""
    # Letters, digits and the accents that belong to them, of all languages.
    return character if kind[0] in "LMN" or character in _ALLOWED else "_"


def _truncate(text: str, bytes_max: int) -> str:
    return text.encode()[:bytes_max].decode(errors="ignore")


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
# Containers whose first bytes don't tell whether they have video or only audio.
_AUDIO_CONTAINERS: Mapping[str, str] = {
    "audio/mp4": "video/mp4",
    "audio/webm": "video/webm",
    "audio/x-matroska": "video/x-matroska",
}


def canonical_type(media_type: str) -> str:
    """Returns the media type without parameters, in lower case, with aliases replaced."""
    bare = media_type.partition(";")[0].strip().lower()
    return _ALIASES.get(bare, bare)


def extension_of(media_type: str) -> str | None:
    """Returns the file extension with its dot; None for types that are not media."""
    return ENDINGS.get(canonical_type(media_type))


def kind_of(media_type: str) -> MediaKind | None:
    family = canonical_type(media_type).partition("/")[0]
    kinds: tuple[MediaKind, ...] = ("image", "video", "audio")
    return next((kind for kind in kinds if kind == family), None)


def is_media_type(claimed: str, first: bytes) -> bool:
    wanted, found = canonical_type(claimed), sniff_type(first)
    return found is not None and found in (wanted, _AUDIO_CONTAINERS.get(wanted))


def check_claim(claimed: str, first: bytes) -> str:
    """Returns the canonical media type; raises if the first bytes are of another type."""
    if not is_media_type(claimed, first):
        found = sniff_type(first) or "no media that we know"
        raise InvalidInput(
            f"the file is said to be {canonical_type(claimed)[:100]}, and is {found}",
            field="content_type",
            found=sniff_type(first),
        )
    return canonical_type(claimed)


@dataclass(frozen=True, slots=True)
class MediaItem:
    id: UUID
    tenant_id: UUID
    user_id: UUID
    kind: MediaKind
    original_file_id: UUID | None  # none once it has expired
    created_at: datetime
    processed_file_id: UUID | None = None  # of the latest job
    job_id: UUID | None = None  # the latest
    active_job_id: UUID | None = None  # the same, until it ends
    processing_details: Mapping[str, Any] = field(default_factory=dict)
    expired_at: datetime | None = None

    @property
    def subject(self) -> str:
        return f"media:{self.id}"

    @property
    def file_ids(self) -> tuple[UUID, ...]:
        return tuple(each for each in (self.original_file_id, self.processed_file_id) if each)


class MediaFilter(NamedTuple):
    """What a list of media is filtered by; None does not filter."""

    kind: MediaKind | None = None
    status: MediaStatus | None = None
    effect_id: UUID | None = None  # of any of its jobs
    text: str | None = None  # in the name of the file


ANY_MEDIA = MediaFilter()
_ID_DIGITS = re.compile(r"[0-9a-f]{6,32}")


def ids_beginning(text: str) -> tuple[UUID, UUID] | None:
    """Returns the first and the last id that begins with these digits; None if they are too few, or none."""
    digits = text.replace("-", "").lower()
    if not _ID_DIGITS.fullmatch(digits):
        return None
    return UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))


SHARES_PER_USER_MAX = 1000
SHARE_PREFIX = "cfs_"
_SECRET_BYTES = 32
_SHARE_SECRET = re.compile(SHARE_PREFIX + r"[A-Za-z0-9_-]{64}")


@dataclass(frozen=True, slots=True)
class SharedLink:
    """A link by which a user shows one result to people without a key. Of its secret the hash is stored."""

    id: UUID
    tenant_id: UUID
    user_id: UUID
    job_id: UUID
    video_id: UUID | None
    has_original: bool
    secret_hash: str
    created_at: datetime
    expires_at: datetime
    revoked_at: datetime | None = None

    def is_open(self, now: datetime) -> bool:
        return self.revoked_at is None and now < self.expires_at


def new_share_secret(tenant_id: UUID) -> str:
    """Begins with the tenant, as each has its own database; the rest can't be guessed."""
    said = tenant_id.bytes + secrets.token_bytes(_SECRET_BYTES)
    return SHARE_PREFIX + base64.urlsafe_b64encode(said).decode()


def tenant_of_share(secret: str) -> UUID | None:
    if not _SHARE_SECRET.fullmatch(secret):
        return None
    return UUID(bytes=base64.urlsafe_b64decode(secret.removeprefix(SHARE_PREFIX))[:16])


def status_of(media: MediaItem, job_status: str | None) -> MediaStatus:
    """Returns the status of a media item; `job_status` is that of its latest job, None without one."""
    if media.expired_at is not None:
        return MediaStatus.EXPIRED
    if media.job_id is None or job_status is None:
        return MediaStatus.UPLOADED
    return MediaStatus(job_status)


__all__ = [
    "SNIFF_BYTES",
    "MediaKind",
    "canonical_type",
    "check_claim",
    "is_media_type",
    "kind_of",
    "sniff_type",
]
