"""Sign-ins of browsers: opened by a key, found by their secret, over with their key, by a sign-out, or in time."""

import hashlib
import hmac
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from comfyfleet.api.values import is_storable
from comfyfleet.errors import Unauthenticated
from comfyfleet.server.db import Tx
from comfyfleet.server.secrets import hash_key, is_key_of_hash
from comfyfleet.server.tenants import service, store
from comfyfleet.server.tenants.model import (
    FIRST_OWNER,
    OPERATOR_KEY_PREFIX,
    SESSIONS_PER_KEY_MAX,
    ActingOperator,
    BrowserSession,
    Caller,
    Operator,
    Role,
)
from comfyfleet.settings import Settings

EXPIRED_PER_SIGN_IN_MAX = 100


@dataclass(frozen=True, slots=True)
class SessionGrant:
    """As whom somebody may sign in: what a key, or an identity provider, has proved. `is_whole`: it says all that
    this person is, so nothing stays of whoever used the browser before."""

    customer: Caller | None = None
    operator: Operator | None = None
    is_first_owner: bool = False
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class NewSession:
    """A session to be opened. `secret` is for the cookie, and only its hash is stored. `replaces`: the
    secret of the session that the same browser has; whoever is signed in there stays so."""

    id: UUID
    secret: str
    grant: SessionGrant
    replaces: str | None = None


async def grant_of_key(tx: Tx, key: str, *, admin_key_hash: str, now: datetime) -> SessionGrant:
    """Returns as whom a key signs in, be it a customer's or an operator's. Raises Unauthenticated."""
    if not is_storable(key):
        raise Unauthenticated("this key is unknown")
    if is_key_of_hash(key, admin_key_hash):
        return SessionGrant(is_first_owner=True)
    if key.startswith(OPERATOR_KEY_PREFIX):
        return SessionGrant(operator=await service.authenticate_operator(tx, key))
    return SessionGrant(customer=await service.authenticate_key(tx, key, now=now))


async def open_session(
    tx: Tx, new: NewSession, *, settings: Settings, admin_key_hash: str, now: datetime
) -> BrowserSession:
    """Opens a session under a new secret: one that somebody else has put into a browser is worth nothing."""
    opened = await _replaced(tx, new, settings, admin_key_hash, now)
    if opened is None:
        opened = _merged(new, None, settings, now)
        await store.add_session(tx, _row(opened, new.secret, admin_key_hash, now))
    await store.delete_expired_sessions(tx, before=now, limit=EXPIRED_PER_SIGN_IN_MAX)
    if opened.customer is not None:
        await _end_oldest(tx, key_id=opened.customer.key.id)
    if opened.operator is not None:
        row = opened.operator_row
        await _end_oldest(tx, operator_id=row.id if row else None)
    return opened


async def _replaced(
    tx: Tx, new: NewSession, settings: Settings, admin_key_hash: str, now: datetime
) -> BrowserSession | None:
    """Takes over the browser's session, unless it has ended or may be another person's: then it is removed."""
    if new.replaces is None:
        return None
    previous = None
    if not new.grant.is_whole:
        previous = await find_session(tx, new.replaces, admin_key_hash=admin_key_hash, now=now)
    if previous is None:
        await end_session(tx, new.replaces)
        return None
    opened = _merged(new, previous, settings, now)
    row = _row(opened, new.secret, admin_key_hash, now)
    is_replaced = await store.replace_session(tx, hash_key(new.replaces), row)
    return opened if is_replaced else None


async def find_session(
    tx: Tx, secret: str, *, admin_key_hash: str, now: datetime
) -> BrowserSession | None:
    """Returns who is signed in: whose key was revoked, or whose time is over, is not. None: nobody."""
    found = await store.session_by_hash(tx, hash_key(secret))
    if found is None or not is_key_of_hash(secret, found.values["secret_hash"]):
        return None
    session_id: UUID = found.values["id"]
    session = BrowserSession(session_id)
    until = found.values["customer_until"]
    if found.key is not None and found.tenant is not None and until is not None and until > now:
        caller = Caller(found.key, found.tenant, session_id)
        if service.is_key_current(found.key, now):
            session = replace(session, customer=caller, customer_until=until)
    until = found.values["operator_until"]
    acting = _acting(found, secret, admin_key_hash)
    if acting is not None and until is not None and until > now:
        session = replace(
            session, operator=acting, operator_until=until, operator_row=found.operator
        )
    return None if session.is_empty else session


async def end_session(tx: Tx, secret: str) -> None:
    await store.delete_session(tx, hash_key(secret))


async def is_caller_valid(tx: Tx, caller: Caller, *, now: datetime) -> bool:
    """Whether the key of an open stream, and the sign-in by which it came, are still valid."""
    if not await service.is_key_valid(tx, caller.key, now=now):
        return False
    if caller.session_id is None:
        return True
    return await store.has_session(tx, caller.session_id, caller.key.id, now)


def _acting(found: store.SessionRow, secret: str, admin_key_hash: str) -> ActingOperator | None:
    if found.operator is not None:
        operator = found.operator
        is_valid = operator.revoked_at is None
        return ActingOperator(operator.subject, operator.role) if is_valid else None
    proof = found.values["admin_proof"]
    if proof is None or not hmac.compare_digest(proof, _admin_proof(secret, admin_key_hash)):
        return None
    return ActingOperator(FIRST_OWNER, Role.OWNER)


def _merged(
    new: NewSession, previous: BrowserSession | None, settings: Settings, now: datetime
) -> BrowserSession:
    session = previous or BrowserSession(new.id)
    grant = new.grant
    if grant.customer is not None:
        caller = replace(grant.customer, session_id=session.id)
        until = now + timedelta(hours=settings.session_hours)
        until = min(filter(None, (until, caller.key.expires_at)))
        session = replace(session, customer=caller, customer_until=until)
    operator = grant.operator
    if operator is not None or grant.is_first_owner:
        acting = ActingOperator(
            operator.subject if operator else FIRST_OWNER, operator.role if operator else Role.OWNER
        )
        until = now + timedelta(hours=settings.operator_session_hours)
        session = replace(session, operator=acting, operator_row=operator, operator_until=until)
    return session


def _row(
    session: BrowserSession, secret: str, admin_key_hash: str, now: datetime
) -> dict[str, Any]:
    ends = [each for each in (session.customer_until, session.operator_until) if each is not None]
    proof = _admin_proof(secret, admin_key_hash) if session.is_of_first_owner else None
    return {
        "id": session.id,
        "secret_hash": hash_key(secret),
        "created_at": now,
        "expires_at": max(ends),
        "api_key_id": session.customer.key.id if session.customer else None,
        "customer_until": session.customer_until,
        "operator_id": session.operator_row.id if session.operator_row else None,
        "admin_proof": proof,
        "operator_until": session.operator_until,
    }


def _admin_proof(secret: str, admin_key_hash: str) -> str:
    """Tells, only together with the cookie, by which admin key a session was opened: a new key ends it, and
    whoever reads the database can't guess the key."""
    return hashlib.sha256(f"{secret}:{admin_key_hash}".encode()).hexdigest()


async def _end_oldest(
    tx: Tx, *, key_id: UUID | None = None, operator_id: UUID | None = None
) -> None:
    await store.delete_oldest_sessions(
        tx, key_id=key_id, operator_id=operator_id, kept=SESSIONS_PER_KEY_MAX
    )
