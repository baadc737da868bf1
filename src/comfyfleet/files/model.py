"""A tenant's stored objects: what is known of them, and the keys that they lie under. Pure."""

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID, uuid5

from comfyfleet.kernel.errors import InvalidInput

FILENAME_CHARACTERS_MAX = 300
SAFE_NAME_BYTES_MAX = 150
SUFFIX_BYTES_MAX = 20
NAMELESS = "file"
CONTENT_HASH = re.compile(r"[0-9a-f]{64}")
_ALLOWED = " .-_()[]+,=@~"


@dataclass(frozen=True, slots=True)
class File:
    """One row. While it is only announced, nobody has seen its bytes: size and hash are None."""

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

    @property
    def is_announced(self) -> bool:
        return self.size is None


def checked(file: File) -> File:
    if file.size is not None and file.size < 0:
        raise InvalidInput(f"a file can't have {file.size} bytes", field="size")
    if not file.filename or len(file.filename) > FILENAME_CHARACTERS_MAX:
        raise InvalidInput(
            f"a file name has 1 to {FILENAME_CHARACTERS_MAX} characters", field="filename"
        )
    if file.content_hash is not None:
        checked_hash(file.content_hash)
    return file


def checked_hash(content_hash: str) -> str:
    if not CONTENT_HASH.fullmatch(content_hash):
        raise InvalidInput(
            "a content hash is BLAKE3, written as 64 hexadecimal digits in lower case",
            field="content_hash",
        )
    return content_hash


def output_key(tenant_id: UUID, job_id: UUID, delivery: UUID, name: str) -> str:
    """New for each lease (`delivery` names it), so that a late writer overwrites nothing."""
    suffix = PurePosixPath(safe_name(name)).suffix
    # JSON may hold halves of characters, which no text can be made of.
    plain = name.encode(errors="backslashreplace").decode()
    return f"tenants/{tenant_id}/ai-jobs/{job_id}/output-{uuid5(delivery, plain)}{suffix}"


def kept_output_key(tenant_id: UUID, job_id: UUID, file_id: UUID, suffix: str) -> str:
    """Where an output is kept: no URL to write to it was ever made."""
    return f"tenants/{tenant_id}/ai-jobs/{job_id}/{file_id}{suffix}"


def upload_key(tenant_id: UUID, upload_id: UUID, name: str) -> str:
    return f"tenants/{tenant_id}/uploads/{upload_id}/{safe_name(name)}"


def stored_key(tenant_id: UUID, file_id: UUID, version: UUID, suffix: str) -> str:
    """Where an upload is kept: no URL to write to it was ever made."""
    return f"tenants/{tenant_id}/files/{file_id}/{version}{suffix}"


def renamed(filename: str, suffix: str) -> str:
    """The same name with another ending."""
    stem, dot, ending = filename.rpartition(".")
    is_ending = dot and 0 < len(ending) <= SUFFIX_BYTES_MAX and "/" not in ending
    return f"{(stem if is_ending and stem else filename)[: FILENAME_CHARACTERS_MAX - 20]}{suffix}"


def safe_name(name: str) -> str:
    """The last part of a name, fit for any file system, URL and shell; its suffix is kept."""
    last = re.split(r"[/\\]", unicodedata.normalize("NFC", name))[-1]
    kept = "".join(_safe(character) for character in last).strip(" .")
    stem, dot, suffix = kept.rpartition(".")
    if not dot or not stem.strip(" .") or len(suffix.encode()) > SUFFIX_BYTES_MAX:
        stem, dot, suffix = kept, "", ""
    room = SAFE_NAME_BYTES_MAX - len(f"{dot}{suffix}".encode())
    return f"{_shortened(stem, room).strip(' .') or NAMELESS}{dot}{suffix}"


def _safe(character: str) -> str:
    kind = unicodedata.category(character)
    if kind[0] == "C":  # controls, marks of direction, halves of characters
        return ""
    # Letters, digits and the accents that belong to them, of all languages.
    return character if kind[0] in "LMN" or character in _ALLOWED else "_"


def _shortened(text: str, bytes_max: int) -> str:
    return text.encode()[:bytes_max].decode(errors="ignore")
