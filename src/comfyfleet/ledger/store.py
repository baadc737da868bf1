"""The ledger's only SQL: wallets are locked and changed, transactions only added."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    FromClause,
    Row,
    and_,
    bindparam,
    func,
    literal,
    literal_column,
    or_,
    select,
    update,
)

from comfyfleet.db import Tx
from comfyfleet.db.dialect import insert_if_new, is_one_of, is_sqlite
from comfyfleet.db.statement import Call, Insert, Statement
from comfyfleet.db.tenant import token_transactions as lines
from comfyfleet.db.tenant import token_wallets as wallets
from comfyfleet.db.types import Moment
from comfyfleet.ledger.model import SETTLES, Transaction, TransactionType, Wallet


async def wallet(tx: Tx, tenant_id: UUID, user_id: UUID) -> Wallet | None:
    found = (await tx.execute(select(wallets).where(_is(tenant_id, user_id)))).first()
    return _wallet(found) if found else None


_IS_BOUND = and_(
    wallets.c.tenant_id == bindparam("of_tenant"), wallets.c.user_id == bindparam("of_user")
)
# On PostgreSQL a change of nothing, which locks as well, and shows in the row's version.
_LOCK = Statement(
    lambda tx: (
        select(wallets).where(_IS_BOUND)
        if is_sqlite(tx)
        else update(wallets).where(_IS_BOUND).values(balance=wallets.c.balance).returning(wallets)
    )
)


async def lock(tx: Tx, tenant_id: UUID, user_id: UUID) -> Wallet | None:
    found = await _LOCK.first(tx, {"of_tenant": tenant_id, "of_user": user_id})
    return Wallet(**found) if found else None


async def open_wallet(tx: Tx, tenant_id: UUID, user_id: UUID, now: datetime) -> None:
    row = {"tenant_id": tenant_id, "user_id": user_id, "balance": 0, "created_at": now}
    await tx.execute(insert_if_new(tx, wallets, [row]))


async def take(
    tx: Tx, tenant_id: UUID, user_id: UUID, amount: int, job_ids: Collection[UUID]
) -> int | None:
    """What is left; none if there was too little, or one of the jobs has its tokens already."""
    values = {"of_tenant": tenant_id, "of_user": user_id, "amount_taken": amount}
    if len(job_ids) == 1:
        found = await _TAKE.first(tx, {**values, "of_job": next(iter(job_ids))})
        return found["balance"] if found else None
    statement = taking(is_one_of(tx, lines.c.job_id, job_ids))
    left: int | None = (await tx.execute(statement, values)).scalar_one_or_none()
    return left


def version_of_wallet() -> ColumnElement[Any]:
    """Of the bound wallet on PostgreSQL: another one after every change and every lock."""
    return select(literal_column("token_wallets.xmin")).where(_IS_BOUND).scalar_subquery()


def is_unchanged(seen: FromClause) -> ColumnElement[bool]:
    """In the UPDATE of a wallet: its version is still the one that was seen."""
    return literal_column("token_wallets.xmin") == select(seen.c.version).scalar_subquery()


def taking(is_of_jobs: ColumnElement[bool]) -> Any:
    """Takes `amount_taken` from a wallet that has as much, once for a job."""
    reserved = select(lines.c.id).where(
        lines.c.tenant_id == bindparam("of_tenant"),
        is_of_jobs,
        lines.c.type == TransactionType.JOB_RESERVE,
    )
    amount = bindparam("amount_taken", type_=BigInteger)
    return (
        update(wallets)
        .where(_IS_BOUND, wallets.c.balance >= amount, ~reserved.exists())
        .values(balance=wallets.c.balance - amount)
        .returning(wallets.c.balance)
    )


_TAKE = Statement(lambda tx: taking(lines.c.job_id == bindparam("of_job")))


async def give(tx: Tx, tenant_id: UUID, user_id: UUID, amount: int) -> int:
    statement = (
        update(wallets)
        .where(_is(tenant_id, user_id))
        .values(balance=wallets.c.balance + amount)
        .returning(wallets.c.balance)
    )
    balance: int = (await tx.execute(statement)).scalar_one()
    return balance


_ADD = Insert(
    lines,
    (
        "tenant_id",
        "user_id",
        "job_id",
        "type",
        "amount",
        "provider_transaction_id",
        "created_at",
    ),
    returning=[lines.c.id],
)


async def add(tx: Tx, rows: Sequence[Mapping[str, Any]]) -> int:
    """How many of them are new."""
    whole = [{"job_id": None, "provider_transaction_id": None, **row} for row in rows]
    return len(await _ADD.add(tx, whole))


def consumption(
    tx: Tx, tenant_id: ColumnElement[Any], job_id: ColumnElement[Any], now: ColumnElement[Any]
) -> Any:
    """An INSERT of what was reserved for a job as spent, which may be a part of another statement."""
    reserved = select(
        lines.c.tenant_id,
        lines.c.user_id,
        lines.c.job_id,
        literal(TransactionType.JOB_CONSUME),
        literal(0),
        now,
    ).where(
        lines.c.tenant_id == tenant_id,
        lines.c.job_id == job_id,
        lines.c.type == TransactionType.JOB_RESERVE,
    )
    columns = ["tenant_id", "user_id", "job_id", "type", "amount", "created_at"]
    return insert_if_new(tx, lines).from_select(columns, reserved)


_CONSUME = Statement(
    lambda tx: consumption(
        tx, bindparam("of_tenant"), bindparam("of_job"), bindparam("settled_at", type_=Moment)
    )
)


def consuming(tenant_id: UUID, job_id: UUID, now: datetime) -> Call:
    """Nothing happens to a job without a reservation, or that was settled before."""
    return _CONSUME, {"of_tenant": tenant_id, "of_job": job_id, "settled_at": now}


async def of_payment(tx: Tx, tenant_id: UUID, provider_id: str) -> Transaction | None:
    query = select(lines).where(
        lines.c.tenant_id == tenant_id, lines.c.provider_transaction_id == provider_id
    )
    found = (await tx.execute(query)).first()
    return _line(found) if found else None


async def of_jobs(
    tx: Tx, tenant_id: UUID, job_ids: Collection[UUID], types: Collection[TransactionType]
) -> list[Transaction]:
    query = (
        select(lines)
        .where(
            lines.c.tenant_id == tenant_id,
            is_one_of(tx, lines.c.job_id, job_ids),
            lines.c.type.in_(types),
        )
        .order_by(lines.c.id)
    )
    return [_line(row) for row in await tx.execute(query)]


async def newest(
    tx: Tx, tenant_id: UUID, user_id: UUID, *, before_id: int | None, limit: int
) -> list[Transaction]:
    query = (
        select(lines)
        .where(lines.c.tenant_id == tenant_id, lines.c.user_id == user_id)
        .order_by(lines.c.id.desc())
        .limit(limit)
    )
    if before_id is not None:
        query = query.where(lines.c.id < before_id)
    return [_line(row) for row in await tx.execute(query)]


async def unbalanced(tx: Tx, tenant_id: UUID | None) -> list[Row[Any]]:
    """Wallets below zero or unlike their sum. One statement, and so one moment of both tables."""
    sums = _sums().subquery()
    total = func.coalesce(sums.c.total, 0)
    query = (
        select(wallets.c.tenant_id, wallets.c.user_id, wallets.c.balance, total.label("total"))
        .outerjoin(
            sums,
            and_(wallets.c.tenant_id == sums.c.tenant_id, wallets.c.user_id == sums.c.user_id),
        )
        .where(or_(wallets.c.balance < 0, wallets.c.balance != total))
    )
    if tenant_id is not None:
        query = query.where(wallets.c.tenant_id == tenant_id)
    return list(await tx.execute(query))


async def without_wallet(tx: Tx, tenant_id: UUID | None) -> list[Row[Any]]:
    there = select(wallets.c.balance).where(
        wallets.c.tenant_id == lines.c.tenant_id, wallets.c.user_id == lines.c.user_id
    )
    query = _sums().where(~there.exists())
    if tenant_id is not None:
        query = query.where(lines.c.tenant_id == tenant_id)
    return list(await tx.execute(query))


async def unmatched(tx: Tx, tenant_id: UUID | None) -> list[Row[Any]]:
    """Jobs settled more than once, without a reservation, or refunded otherwise than reserved."""
    is_reserve = lines.c.type == TransactionType.JOB_RESERVE
    is_refund = lines.c.type == TransactionType.JOB_REFUND
    reserves = func.count().filter(is_reserve)
    settled = func.count().filter(lines.c.type.in_(SETTLES))
    reserved = func.coalesce(-func.sum(lines.c.amount).filter(is_reserve), 0)
    refunded = func.coalesce(func.sum(lines.c.amount).filter(is_refund), 0)
    query = (
        select(
            lines.c.tenant_id,
            lines.c.job_id,
            func.count(lines.c.user_id.distinct()).label("payers"),
            reserves.label("reserves"),
            settled.label("settled"),
            reserved.label("reserved"),
            refunded.label("refunded"),
        )
        .where(lines.c.job_id.is_not(None))
        .group_by(lines.c.tenant_id, lines.c.job_id)
        .having(
            or_(
                settled > 1,
                reserves != 1,
                func.count(lines.c.user_id.distinct()) > 1,
                and_(refunded > 0, refunded != reserved),
            )
        )
    )
    if tenant_id is not None:
        query = query.where(lines.c.tenant_id == tenant_id)
    return list(await tx.execute(query))


def _sums() -> Any:
    total = func.sum(lines.c.amount).label("total")
    return select(lines.c.tenant_id, lines.c.user_id, total).group_by(
        lines.c.tenant_id, lines.c.user_id
    )


def _is(tenant_id: UUID, user_id: UUID) -> ColumnElement[bool]:
    return and_(wallets.c.tenant_id == tenant_id, wallets.c.user_id == user_id)


def _wallet(row: Row[Any]) -> Wallet:
    return Wallet(**row._mapping)


def _line(row: Row[Any]) -> Transaction:
    return Transaction(**{**row._mapping, "type": TransactionType(row.type)})
