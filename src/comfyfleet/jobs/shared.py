"""What all control planes must know at the same time; kept in the central database."""

from datetime import datetime

from comfyfleet.db import Tx
from comfyfleet.db.state import MAINTENANCE, read_state, write_state

LAST_EXPIRY, RECONCILED = "last_expiry", "reconciled"
SETTLING_UNTIL = "settling_until"


async def in_maintenance(tx: Tx) -> bool:
    return bool(await read_state(tx, MAINTENANCE))


async def set_maintenance(tx: Tx, *, is_on: bool) -> None:
    await write_state(tx, MAINTENANCE, is_on)


async def last_expiry(tx: Tx) -> datetime | None:
    """When leases were last looked at, by whichever control plane."""
    kept = await read_state(tx, LAST_EXPIRY)
    return datetime.fromisoformat(kept) if kept else None


async def note_expiry(tx: Tx, now: datetime) -> None:
    await write_state(tx, LAST_EXPIRY, now.isoformat())


async def reconciled(tx: Tx) -> str | None:
    """Where the next pass of the sweep goes on, whichever control plane runs it."""
    return await read_state(tx, RECONCILED) or None


async def note_reconciled(tx: Tx, place: str | None) -> None:
    """None: all was read, and the next pass begins anew."""
    await write_state(tx, RECONCILED, place or "")


async def is_settling(tx: Tx, now: datetime) -> bool:
    """An outage of ours has just ended: workers may not have been able to call until now."""
    until = await read_state(tx, SETTLING_UNTIL)
    return bool(until) and now < datetime.fromisoformat(until)


async def settle_until(tx: Tx, moment: datetime) -> None:
    await write_state(tx, SETTLING_UNTIL, moment.isoformat())
