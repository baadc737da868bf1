"""The secret that our URLs are signed with: made at the first start, read ever after."""

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

from comfyfleet.kernel.errors import Refused

SECRET_FILE = "url-signing.secret"  # noqa: S105
SECRET_BYTES = 32


def signing_secret(folder: Path) -> bytes:
    """Kept in the data folder, for its owner's eyes only. Without it, all URLs out there die."""
    path = folder / SECRET_FILE
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _make(path)
    return _read(path)


def _read(path: Path) -> bytes:
    text = path.read_text(encoding="ascii", errors="replace").strip()
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) < SECRET_BYTES:
        raise Refused(
            f"{path} is no secret of ours: it must hold {2 * SECRET_BYTES} hexadecimal digits",
            hint="remove it to get a new one; URLs that were handed out then stop working",
        )
    return secret


def _make(path: Path) -> None:
    descriptor, draft = tempfile.mkstemp(prefix=".secret-", dir=path.parent)  # has mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        # A link never replaces: of two processes that start at once, both get the first one's.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)
