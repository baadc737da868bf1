"""The model of stored files with their keys, users' media items, and media types with canonical
names. Pure."""

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
    """A stored file or an announced upload. The size and hash of an announced upload are None until
    its content has been checked."""

    id: UUID
    tenant_id: UUID
    disk: str  # local or s3
    path: str  # the unique key in object storage
    filename: str  # the name given by its owner
    mime_type: str
    created_at: datetime
    user_id: UUID | None = None
    size: int | None = None
    content_hash: str | None = None  # BLAKE3 as 64 hexadecimal digits, without a prefix
    metadata: Mapping[str, Any] = field(default_factory=dict)
    checked_at: datetime | None = None  # when its content was checked
    kept_from: datetime | None = None  # start of its retention period; None means created_at

    @property
    def is_announced(self) -> bool:
        return self.size is None

    @property
    def object_keys(self) -> tuple[str, str]:
        """The keys of the file's object and of its thumbnail, if it can have one. Both are deleted
        together."""
        return self.path, small_key(self.path)


def check_file(file: File) -> File:
    if file.size is not None and file.size < 0:
        raise InvalidInput(f"a file can't have {file.size} bytes", field="size")
    if not file.filename or len(file.filename) > FILENAME_CHARACTERS_MAX:
        raise InvalidInput(
            f"a file name must have 1 to {FILENAME_CHARACTERS_MAX} characters", field="filename"
        )
    if file.content_hash is not None:
        check_hash(file.content_hash)
    return file


def check_hash(content_hash: str) -> str:
    if not CONTENT_HASH.fullmatch(content_hash):
        raise InvalidInput(
            "a content hash must be BLAKE3, as 64 lower-case hexadecimal digits",
            field="content_hash",
        )
    return content_hash


def output_key(tenant_id: UUID, job_id: UUID, delivery: UUID, name: str) -> str:
    """Returns an upload key for an output. `delivery` is unique per lease, so a late worker can't
    overwrite anything."""
    suffix = PurePosixPath(safe_name(name)).suffix
    # JSON may contain lone surrogates, which can't be encoded.
    plain = name.encode(errors="backslashreplace").decode()
    return f"tenants/{tenant_id}/ai-jobs/{job_id}/output-{uuid5(delivery, plain)}{suffix}"


def kept_output_key(tenant_id: UUID, job_id: UUID, file_id: UUID, suffix: str) -> str:
    """Returns the final key of an output. There is no upload URL for it, so nobody can overwrite
    it."""
    return f"tenants/{tenant_id}/ai-jobs/{job_id}/{file_id}{suffix}"


_OUTPUT_KEY = re.compile(r"tenants/[0-9a-f-]{36}/ai-jobs/(?P<job>[0-9a-f-]{36})/")


def job_in_key(key: str) -> UUID | None:
    """Returns the job that produced the object, or None for uploads."""
    match = _OUTPUT_KEY.match(key)
    try:
        return UUID(match["job"]) if match else None
    except ValueError:
        return None


def upload_key(tenant_id: UUID, upload_id: UUID, name: str) -> str:
    return f"tenants/{tenant_id}/uploads/{upload_id}/{safe_name(name)}"


def part_key(key: str, number: int) -> str:
    """Returns the key of a part of an upload. It is outside the upload's own folder, because the
    file name there can be anything."""
    return f"{key.rpartition('/')[0]}.parts/{number:05d}"


def stored_key(tenant_id: UUID, file_id: UUID, version: UUID, suffix: str) -> str:
    """Returns the final key of an upload. There is no upload URL for it, so nobody can overwrite
    it."""
    return f"tenants/{tenant_id}/files/{file_id}/{version}{suffix}"


_SMALL_SUFFIX = ".small.webp"


def small_key(key: str) -> str:
    """Returns the key of an object's thumbnail."""
    return f"{key}{_SMALL_SUFFIX}"


def owner_of_small(key: str) -> str:
    """Returns the key of the object that a thumbnail belongs to. Returns the key itself if it isn't
    a thumbnail's."""
    return key.removesuffix(_SMALL_SUFFIX)


def replace_suffix(filename: str, suffix: str) -> str:
    """Replaces the suffix of a file name."""
    stem, dot, ending = filename.rpartition(".")
    is_ending = dot and 0 < len(ending) <= SUFFIX_BYTES_MAX and "/" not in ending
    return f"{(stem if is_ending and stem else filename)[: FILENAME_CHARACTERS_MAX - 20]}{suffix}"


def safe_name(name: str) -> str:
    """Returns the last part of a path, limited to characters that are safe in file systems, URLs
    and shells. Keeps the suffix."""
    last = re.split(r"[/\\]", unicodedata.normalize("NFC", name))[-1]
    cleaned = "".join(_safe(character) for character in last).strip(" .")
    stem, dot, suffix = cleaned.rpartition(".")
    if not dot or not stem.strip(" .") or len(suffix.encode()) > SUFFIX_BYTES_MAX:
        stem, dot, suffix = cleaned, "", ""
    room = SAFE_NAME_BYTES_MAX - len(f"{dot}{suffix}".encode())
    return f"{_truncate(stem, room).strip(' .') or NAMELESS}{dot}{suffix}"


def _safe(character: str) -> str:
    kind = unicodedata.category(character)
    if kind[0] == "C":  # control characters, direction marks, surrogates
        return ""
    # Letters, digits and combining accents of all languages.
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
# Containers whose first bytes don't reveal whether they contain video or only audio.
_AUDIO_CONTAINERS: Mapping[str, str] = {
    "audio/mp4": "video/mp4",
    "audio/webm": "video/webm",
    "audio/x-matroska": "video/x-matroska",
}


def canonical_type(media_type: str) -> str:
    """Returns the media type in lower case, without parameters and with aliases replaced."""
    bare = media_type.partition(";")[0].strip().lower()
    return _ALIASES.get(bare, bare)


def extension_of(media_type: str) -> str | None:
    """Returns the file extension with its dot, or None for types that are not media."""
    return ENDINGS.get(canonical_type(media_type))


def kind_of(media_type: str) -> MediaKind | None:
    family = canonical_type(media_type).partition("/")[0]
    kinds: tuple[MediaKind, ...] = ("image", "video", "audio")
    return next((kind for kind in kinds if kind == family), None)


def is_media_type(claimed: str, first: bytes) -> bool:
    claimed_type, actual_type = canonical_type(claimed), sniff_type(first)
    return actual_type is not None and actual_type in (
        claimed_type,
        _AUDIO_CONTAINERS.get(claimed_type),
    )


def check_claim(claimed: str, first: bytes) -> str:
    """Returns the canonical media type. Raises an error if the first bytes are of another type."""
    if not is_media_type(claimed, first):
        actual = sniff_type(first) or "an unknown type"
        raise InvalidInput(
            f"the file was announced as {canonical_type(claimed)[:100]}, but it is {actual}",
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
    original_file_id: UUID | None  # None after it has expired
    created_at: datetime
    processed_file_id: UUID | None = None  # result of the latest job
    job_id: UUID | None = None  # the latest job
    active_job_id: UUID | None = None  # the latest job, until it ends
    processing_details: Mapping[str, Any] = field(default_factory=dict)
    expired_at: datetime | None = None

    @property
    def subject(self) -> str:
        return f"media:{self.id}"

    @property
    def file_ids(self) -> tuple[UUID, ...]:
        return tuple(
            file_id for file_id in (self.original_file_id, self.processed_file_id) if file_id
        )


class MediaFilter(NamedTuple):
    """The filters for a list of media. None matches everything."""

    kind: MediaKind | None = None
    status: MediaStatus | None = None
    effect_id: UUID | None = None  # an effect that was used for any of its jobs
    text: str | None = None  # part of the file name


ANY_MEDIA = MediaFilter()
_ID_DIGITS = re.compile(r"[0-9a-f]{6,32}")


def ids_beginning(text: str) -> tuple[UUID, UUID] | None:
    """Returns the first and the last id that begin with these digits. Returns None if they aren't
    digits or are too few."""
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
    """A link that shows one result to people without a key. Only the hash of its secret is
    stored."""

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
    """Generates a secret. It begins with the tenant's id, because each tenant has its own database.
    The rest can't be guessed."""
    data = tenant_id.bytes + secrets.token_bytes(_SECRET_BYTES)
    return SHARE_PREFIX + base64.urlsafe_b64encode(data).decode()


def tenant_of_share(secret: str) -> UUID | None:
    if not _SHARE_SECRET.fullmatch(secret):
        return None
    return UUID(bytes=base64.urlsafe_b64decode(secret.removeprefix(SHARE_PREFIX))[:16])


def status_of(media: MediaItem, job_status: str | None) -> MediaStatus:
    """Returns the status of a media item. `job_status` is the status of its latest job, or None if
    it has no job."""
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
