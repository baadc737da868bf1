"""Operators' changes to tenants and users, each in one transaction with its audit entry.

A change in a tenant's database stores its audit entry there first, and then copies it to the
central audit log."""

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from comfyfleet.server.db import Database, Tx
from comfyfleet.server.notifications.service import (
    PendingAudit,
    flush_audits,
    note_audit,
    note_stop,
    record_audit,
)
from comfyfleet.server.tenants import service, wallet
from comfyfleet.server.tenants.model import Credited, PaymentClaim, Tenant, User


class UserToCreate(NamedTuple):
    id: UUID
    tenant_id: UUID
    email: str | None
    name: str | None


async def show_backends(
    central: Database, tenant_id: UUID, *, show: bool | None, operator: str, now: datetime
) -> Tenant:
    async with central.transaction() as tx:
        tenant = await service.set_show_backends(tx, tenant_id, show)
        details = {"show_backends": show}
        await record_audit(tx, operator, "show_backends", tenant.subject, now, tenant.id, **details)
    return tenant


async def create_user(
    central: Database, pool: Database, new: UserToCreate, *, operator: str, now: datetime
) -> User:
    async with pool.transaction() as tx:
        user = await service.create_user(
            tx,
            user_id=new.id,
            tenant_id=new.tenant_id,
            email=new.email,
            name=new.name,
            now=now,
        )
        await note_audit(tx, user.id, _entry(user, "create_user", operator, now))
    await flush_audits(central, pool)
    return user


async def activate_user(
    central: Database,
    pool: Database,
    tenant_id: UUID,
    user_id: UUID,
    *,
    operator: str,
    now: datetime,
) -> User:
    """Activates a user again. Stopped work is not resumed, and revoked keys remain revoked."""
    async with central.read() as tx:
        await service.require_kept(tx, tenant_id)
    async with pool.transaction() as tx:
        user = await service.set_user_active(tx, tenant_id, user_id, is_active=True)
        await note_audit(tx, user.id, _entry(user, "activate_user", operator, now))
    await flush_audits(central, pool)
    return user


async def deactivate_user(
    central: Database,
    pool: Database,
    tenant_id: UUID,
    user_id: UUID,
    *,
    operator: str,
    now: datetime,
) -> User:
    """Deactivates a user, revokes all keys, and records that the user's work must be stopped.

    The user is deactivated first, so that a sign-in through an identity provider can't create a key
    in between."""
    async with pool.transaction() as tx:
        user = await service.set_user_active(tx, tenant_id, user_id, is_active=False)
        await note_stop(tx, tenant_id, user_id, now=now)
        await note_audit(tx, user.id, _entry(user, "deactivate_user", operator, now))
    async with central.transaction() as tx:
        revoked = await service.revoke_all_keys(tx, tenant_id, user_id, now=now)
        if revoked:
            await record_audit(
                tx, operator, "revoke_keys", user.subject, now, tenant_id, keys_revoked=revoked
            )
    return user


async def credit_payment(
    central: Database,
    pool: Database,
    payment: PaymentClaim,
    *,
    operator: str,
    reason: str | None = None,
    now: datetime,
) -> Credited:
    """Credits a payment once in the whole installation. Its id is claimed in the central database
    first. After an interruption, repeating the call completes the credit."""
    async with pool.read() as tx:
        await service.get_user(tx, payment.tenant_id, payment.user_id)
    async with central.transaction() as tx:
        await wallet.claim_payment(tx, payment, now=now)
    async with pool.transaction() as tx:
        credited = await wallet.credit(
            tx,
            payment.tenant_id,
            payment.user_id,
            payment.amount,
            payment.provider_transaction_id,
            now=now,
        )
        if credited.is_new:
            await _note_credit(tx, payment, operator, reason, now)
    await flush_audits(central, pool)
    return credited


async def _note_credit(
    tx: Tx, payment: PaymentClaim, operator: str, reason: str | None, now: datetime
) -> None:
    subject = f"payment:{payment.tenant_id}/{payment.provider_transaction_id}"
    entry = PendingAudit(operator, "credit", subject, payment.tenant_id, now)
    details: dict[str, object] = {"user_id": str(payment.user_id), "amount": payment.amount}
    if reason:
        details["reason"] = reason
    await note_audit(tx, payment.user_id, entry, **details)


def _entry(user: User, action: str, operator: str, now: datetime) -> PendingAudit:
    return PendingAudit(operator, action, user.subject, user.tenant_id, now)
