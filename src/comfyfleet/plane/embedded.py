"""The fleet that `comfyfleet up` works for itself: made at the first start, with a secret that is kept."""

import os
from pathlib import Path

from comfyfleet.audit import service as audit
from comfyfleet.db import Tx
from comfyfleet.fleets import service as fleets
from comfyfleet.kernel.errors import NotFound, Unauthenticated
from comfyfleet.kernel.keys import KEY_CHARACTERS, hashed, new_key
from comfyfleet.plane.model import Plane

FLEET, STAGE = "default", "production"
SECRET_FILE = "fleet.secret"  # noqa: S105 - the name of a file
SECRET_MODE = 0o600


async def own_fleet_secret(plane: Plane, data: Path) -> str:
    """Written down before it counts: what is on disk without being known is put right here."""
    path = data / SECRET_FILE
    secret = _kept(path) or _written(path)
    async with plane.central.begin() as tx:
        await _make_fit(tx, plane, secret)
    return secret


async def _make_fit(tx: Tx, plane: Plane, secret: str) -> None:
    now = plane.clock()
    try:
        fleet = await fleets.get(tx, FLEET, STAGE)
        fleets.check_secret(fleet, secret)
    except NotFound:
        fleet = await fleets.create(
            tx, slug=FLEET, stage=STAGE, secret_hash=hashed(secret), max_workers=None, now=now
        )
        action = "fleet_created"
    except Unauthenticated:
        fleet = await fleets.rotate_secret(tx, fleet, secret_hash=hashed(secret))
        action = "fleet_secret_rotated"
    else:
        return
    await audit.record(tx, actor="system", action=action, subject=fleet.subject, now=now)


def _kept(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return text if len(text) == KEY_CHARACTERS else None


def _written(path: Path) -> str:
    secret = new_key()
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(path, flags, SECRET_MODE), "w", encoding="ascii") as file:
        file.write(f"{secret}\n")
    return secret
