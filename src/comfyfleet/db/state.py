"""Single values that all control planes share, by name, in the central database."""

from typing import Any

from sqlalchemy import delete, select

from comfyfleet.db.central import control_state
from comfyfleet.db.dialect import insert_if_new, upsert
from comfyfleet.db.engine import Tx

# While it is true, no lease is given; the claiming statement reads it, too.
MAINTENANCE = "maintenance"


async def read_state(tx: Tx, name: str) -> Any:
    """None if it was never written."""
    query = select(control_state.c.value).where(control_state.c.name == name)
    return (await tx.execute(query)).scalar_one_or_none()


async def write_state(tx: Tx, name: str, value: Any) -> None:
    row = {"name": name, "value": value}
    await tx.execute(upsert(tx, control_state, row, key=("name",)))


async def write_state_if_new(tx: Tx, name: str, value: Any) -> Any:
    """The value that stands: of several that start at the same moment, one has set it."""
    await tx.execute(insert_if_new(tx, control_state, [{"name": name, "value": value}]))
    return await read_state(tx, name)


async def forget_state(tx: Tx, name: str) -> None:
    await tx.execute(delete(control_state).where(control_state.c.name == name))
