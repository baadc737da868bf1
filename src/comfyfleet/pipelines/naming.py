"""Where a candidate is found: `{target_folder}/{step-name}/{candidate_id}_{YYYYMMDDHHMMSS}.{ext}`."""

import re
from datetime import UTC, datetime
from uuid import UUID

from comfyfleet.kernel.errors import InvalidInput

FOLDER_CHARACTERS_MAX = 200
_NOT_IN_A_NAME = re.compile(r"[\W_]+")
_EXTENSION = re.compile(r"[a-z0-9]{1,8}")
_FORBIDDEN = re.compile(r"[\\:*?\"<>|\x00-\x1f\x7f]")


def candidate_path(
    *, target_folder: str, step: str, candidate_id: UUID, created_at: datetime, extension: str
) -> str:
    """Unique in its run: no two candidates have one id."""
    stamp = created_at.astimezone(UTC).strftime("%Y%m%d%H%M%S")
    ending = extension.lower().lstrip(".")
    if not _EXTENSION.fullmatch(ending):
        ending = "bin"
    return f"{clean_folder(target_folder)}/{step_folder(step)}/{candidate_id}_{stamp}.{ending}"


def step_folder(name: str) -> str:
    """In lower case with hyphens; letters of every script stay."""
    folder = _NOT_IN_A_NAME.sub("-", name.lower()).strip("-")
    if not folder:
        raise InvalidInput(
            f"a step's name must have a letter or digit in it, not {name!r}", field="name"
        )
    return folder


def clean_folder(folder: str) -> str:
    """A relative folder that stays below wherever it is put."""
    parts = [part for part in folder.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or _FORBIDDEN.search(folder) or folder.startswith("/"):
        raise InvalidInput(
            f"target_folder must be a relative folder such as 'cats/spring', not {folder!r}",
            field="target_folder",
        )
    if len(folder) > FOLDER_CHARACTERS_MAX:
        raise InvalidInput(
            f"target_folder is longer than {FOLDER_CHARACTERS_MAX} characters",
            field="target_folder",
        )
    return "/".join(parts)
