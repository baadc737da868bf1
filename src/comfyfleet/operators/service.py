"""Operators in the central database: made, known by their keys, listed, revoked.

A key is looked up with each call, so one that was revoked is dead at once on every control plane.
"""

from datetime import datetime

from comfyfleet.db import Tx
from comfyfleet.kernel.errors import Conflict, NotFound, Unauthenticated
from comfyfleet.kernel.keys import hashed
from comfyfleet.kernel.texts import is_storable
from comfyfleet.operators import store
from comfyfleet.operators.model import SHOWN_CHARACTERS, NewOperator, Operator, check_name


async def create(tx: Tx, new: NewOperator, *, now: datetime) -> Operator:
    """A name is one person's for ever: the audit tells it."""
    row = {
        "id": new.id,
        "name": check_name(new.name),
        "role": new.role,
        "key_hash": hashed(new.key),
        "prefix": new.key[:SHOWN_CHARACTERS],
        "created_at": now,
        "created_by": new.created_by,
    }
    added = await store.add(tx, row)
    if added is None:
        raise Conflict(f"there is an operator {new.name}, or was one: choose another name")
    return added


async def authenticate(tx: Tx, key: str) -> Operator:
    found = await store.by_hash(tx, hashed(key)) if is_storable(key) else None
    if found is None:
        raise Unauthenticated("this is no operator's key")
    if found.revoked_at is not None:
        raise Unauthenticated("this operator's key was revoked")
    return found


async def note_use(tx: Tx, operator: Operator, *, now: datetime) -> None:
    await store.note_use(tx, operator.id, now)


async def all_of(tx: Tx) -> list[Operator]:
    """The revoked ones among them."""
    return await store.all_of(tx)


async def revoke(tx: Tx, name: str, *, now: datetime) -> Operator:
    """Dead at once; a second time changes nothing."""
    await store.revoke(tx, name, now)
    found = await store.by_name(tx, name)
    if found is None:
        raise NotFound(f"there is no operator {name}")
    return found
