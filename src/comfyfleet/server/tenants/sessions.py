"""Browser sessions. A sign-in with a key or an identity provider opens a session, and a secret in a
cookie identifies it. The session ends when its key is revoked, at sign-out, or when it expires."""

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
    """The customer and the operator that a person signs in as with a key or an identity provider.
    `is_whole` means that the grant covers all roles of the person, so nothing of the browser's
    previous session is kept."""

    customer: Caller | None = None
    operator: Operator | None = None
    is_first_owner: bool = False
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class NewSession:
    """A session to open. `secret` is for the cookie, and only its hash is stored. `replaces` is the
    secret of the browser's previous session, whose sign-in is kept."""

    id: UUID
    secret: str
    grant: SessionGrant
    replaces: str | None = None


async def grant_of_key(tx: Tx, key: str, *, admin_key_hash: str, now: datetime) -> SessionGrant:
    """Returns the customer or operator that a key belongs to. Raises Unauthenticated."""
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
    """Opens a session with a new secret, so that a secret planted in the browser by an attacker
    becomes useless."""
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
    """Takes over the browser's previous session. Deletes it instead if it has ended or may belong
    to another person."""
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
    """Returns the current sign-in of a session, without a customer or operator whose key was
    revoked or whose sign-in has expired. Returns None if neither is signed in."""
    row = await store.session_by_hash(tx, hash_key(secret))
    if row is None or not is_key_of_hash(secret, row.values["secret_hash"]):
        return None
    session_id: UUID = row.values["id"]
    session = BrowserSession(session_id)
    until = row.values["customer_until"]
    if row.key is not None and row.tenant is not None and until is not None and until > now:
        caller = Caller(row.key, row.tenant, session_id)
        if service.is_key_current(row.key, now):
            session = replace(session, customer=caller, customer_until=until)
    until = row.values["operator_until"]
    acting = _acting(row, secret, admin_key_hash)
    if acting is not None and until is not None and until > now:
        session = replace(session, operator=acting, operator_until=until, operator_row=row.operator)
    return None if session.is_empty else session


async def end_session(tx: Tx, secret: str) -> None:
    await store.delete_session(tx, hash_key(secret))


async def is_caller_valid(tx: Tx, caller: Caller, *, now: datetime) -> bool:
    """Checks whether the key of an open stream, and the session that opened it, are still valid."""
    if not await service.is_key_valid(tx, caller.key, now=now):
        return False
    if caller.session_id is None:
        return True
    return await store.has_session(tx, caller.session_id, caller.key.id, now)


def _acting(row: store.SessionRow, secret: str, admin_key_hash: str) -> ActingOperator | None:
    if row.operator is not None:
        operator = row.operator
        is_valid = operator.revoked_at is None
        return ActingOperator(operator.subject, operator.role) if is_valid else None
    proof = row.values["admin_proof"]
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
    ends = [end for end in (session.customer_until, session.operator_until) if end is not None]
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
    """Returns a proof of the admin key with which a session was opened. It can only be checked
    together with the cookie. A new admin key ends the session, and reading the database doesn't
    help to guess the key."""
    return hashlib.sha256(f"{secret}:{admin_key_hash}".encode()).hexdigest()


async def _end_oldest(
    tx: Tx, *, key_id: UUID | None = None, operator_id: UUID | None = None
) -> None:
    await store.delete_oldest_sessions(
        tx, key_id=key_id, operator_id=operator_id, kept=SESSIONS_PER_KEY_MAX
    )
