"""All SQL for tenants, users, API keys, operators, sessions, wallets and transactions."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    FromClause,
    Row,
    and_,
    bindparam,
    delete,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
    update,
)

from comfyfleet.server.db import Tx
from comfyfleet.server.db.central_tables import (
    api_keys,
    operators,
    payments,
    sessions,
    tenants,
)
from comfyfleet.server.db.dialect import Moment, insert_if_new, is_one_of, is_sqlite
from comfyfleet.server.db.driver import PreparedInsert, PreparedStatement, StatementCall, in_parts
from comfyfleet.server.db.tenant_tables import token_transactions as lines
from comfyfleet.server.db.tenant_tables import token_wallets as wallets
from comfyfleet.server.db.tenant_tables import users
from comfyfleet.server.tenants.model import (
    KEY_USE_NOTED_EVERY,
    OPERATOR_USE_NOTED_EVERY,
    SETTLES,
    ApiKey,
    LedgerTransaction,
    Operator,
    PaymentClaim,
    Role,
    Scope,
    Tenant,
    TokenWallet,
    TransactionType,
    User,
)


async def add_tenant(tx: Tx, row: Mapping[str, Any]) -> Tenant:
    added = await tx.execute(insert(tenants).values(dict(row)).returning(tenants))
    return _tenant(added.one())


async def add_tenant_if_new(tx: Tx, row: Mapping[str, Any]) -> None:
    await tx.execute(insert_if_new(tx, tenants, [row]))


_GET_TENANT = PreparedStatement(
    lambda tx: select(tenants).where(tenants.c.id == bindparam("of_id"))
)


async def get_tenant(tx: Tx, tenant_id: UUID) -> Tenant | None:
    row = await _GET_TENANT.first(tx, {"of_id": tenant_id})
    return Tenant(**row) if row else None


async def all_tenants(tx: Tx, *, pool: str | None) -> list[Tenant]:
    query = select(tenants).order_by(tenants.c.created_at, tenants.c.id)
    if pool is not None:
        query = query.where(tenants.c.pool == pool)
    return [_tenant(row) for row in await tx.execute(query)]


async def update_tenant(tx: Tx, tenant_id: UUID, values: Mapping[str, Any]) -> Tenant | None:
    statement = update(tenants).where(tenants.c.id == tenant_id).values(dict(values))
    row = (await tx.execute(statement.returning(tenants))).first()
    return _tenant(row) if row else None


async def count_tenants_by_pool(tx: Tx) -> dict[str, int]:
    query = select(tenants.c.pool, func.count().label("tenants")).group_by(tenants.c.pool)
    return {row.pool: row.tenants for row in await tx.execute(query)}


def _tenant(row: Row[Any]) -> Tenant:
    return Tenant(**row._mapping)


async def add_user(tx: Tx, row: Mapping[str, Any]) -> User | None:
    """Adds a user. Returns None if the tenant already has a user with this address or id."""
    added = (await tx.execute(insert_if_new(tx, users, [row]).returning(users))).first()
    return _user(added) if added else None


async def get_user(tx: Tx, tenant_id: UUID, user_id: UUID) -> User | None:
    query = select(users).where(users.c.tenant_id == tenant_id, users.c.id == user_id)
    row = (await tx.execute(query)).first()
    return _user(row) if row else None


async def user_by_email(tx: Tx, tenant_id: UUID, email: str) -> User | None:
    query = select(users).where(users.c.tenant_id == tenant_id, users.c.email == email)
    row = (await tx.execute(query)).first()
    return _user(row) if row else None


async def page_of_users(tx: Tx, tenant_id: UUID, *, after: User | None, limit: int) -> list[User]:
    query = (
        select(users)
        .where(users.c.tenant_id == tenant_id)
        .order_by(users.c.created_at, users.c.id)
        .limit(limit)
    )
    if after is not None:
        at = users.c.created_at
        later = or_(at > after.created_at, and_(at == after.created_at, users.c.id > after.id))
        query = query.where(later)
    return [_user(row) for row in await tx.execute(query)]


async def update_user(
    tx: Tx, tenant_id: UUID, user_id: UUID, values: Mapping[str, Any]
) -> User | None:
    statement = (
        update(users)
        .where(users.c.tenant_id == tenant_id, users.c.id == user_id)
        .values(dict(values))
        .returning(users)
    )
    row = (await tx.execute(statement)).first()
    return _user(row) if row else None


def _user(row: Row[Any]) -> User:
    return User(**row._mapping)


async def add_key(tx: Tx, row: Mapping[str, Any]) -> ApiKey:
    added = await tx.execute(insert(api_keys).values(dict(row)).returning(api_keys))
    return _key(added.one())


_COLUMNS, _OF_OWNER = ([column.name for column in table.c] for table in (api_keys, tenants))
_KEY_BY_HASH = PreparedStatement(
    lambda tx: (
        select(*api_keys.c, *(column.label(f"owner_{column.name}") for column in tenants.c))
        .join(tenants, tenants.c.id == api_keys.c.tenant_id)
        .where(api_keys.c.key_hash == bindparam("of_hash"))
    )
)


async def key_by_hash(tx: Tx, key_hash: str) -> tuple[ApiKey, Tenant, str] | None:
    """Returns the key, its tenant and the stored hash."""
    rows = await _KEY_BY_HASH.tuples(tx, {"of_hash": key_hash})
    if not rows:
        return None
    mine, owner = in_parts(rows[0], _COLUMNS, _OF_OWNER)
    return _key_of(mine), Tenant(**owner), mine["key_hash"]


async def keys_of_user(tx: Tx, tenant_id: UUID, user_id: UUID, *, limit: int) -> list[ApiKey]:
    query = (
        select(api_keys)
        .where(api_keys.c.tenant_id == tenant_id, api_keys.c.user_id == user_id)
        .order_by(api_keys.c.created_at.desc(), api_keys.c.id)
        .limit(limit)
    )
    return [_key(row) for row in await tx.execute(query)]


async def count_valid_keys(tx: Tx, tenant_id: UUID, user_id: UUID, now: datetime) -> int:
    query = select(func.count()).where(
        api_keys.c.tenant_id == tenant_id,
        api_keys.c.user_id == user_id,
        api_keys.c.revoked_at.is_(None),
        or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > now),
    )
    return await tx.scalar(query) or 0


async def get_key(tx: Tx, tenant_id: UUID, user_id: UUID, key_id: UUID) -> ApiKey | None:
    query = select(api_keys).where(
        api_keys.c.tenant_id == tenant_id,
        api_keys.c.user_id == user_id,
        api_keys.c.id == key_id,
    )
    row = (await tx.execute(query)).first()
    return _key(row) if row else None


async def revoke_key(
    tx: Tx, tenant_id: UUID, user_id: UUID, key_id: UUID | None, now: datetime
) -> int:
    """Revokes one key, or all keys of the user. Returns how many were not revoked before."""
    statement = update(api_keys).where(
        api_keys.c.tenant_id == tenant_id,
        api_keys.c.user_id == user_id,
        api_keys.c.revoked_at.is_(None),
    )
    if key_id is not None:
        statement = statement.where(api_keys.c.id == key_id)
    ended = await tx.execute(statement.values(revoked_at=now).returning(api_keys.c.id))
    return len(ended.all())


async def delete_keys_of(tx: Tx, tenant_id: UUID) -> int:
    statement = delete(api_keys).where(api_keys.c.tenant_id == tenant_id)
    return len((await tx.execute(statement.returning(api_keys.c.id))).all())


async def note_key_use(tx: Tx, key_id: UUID, now: datetime) -> None:
    used = api_keys.c.last_used_at
    await tx.execute(
        update(api_keys)
        .where(api_keys.c.id == key_id, or_(used.is_(None), used <= now - KEY_USE_NOTED_EVERY))
        .values(last_used_at=now)
    )


def _key(row: Row[Any]) -> ApiKey:
    return _key_of(row._mapping)


def _key_of(row: Mapping[Any, Any]) -> ApiKey:
    values = {name: value for name, value in row.items() if name != "key_hash"}
    return ApiKey(**{**values, "scopes": frozenset(Scope(scope) for scope in values["scopes"])})


OPERATORS_LISTED_MAX = 1000


async def add_operator(tx: Tx, row: Mapping[str, Any]) -> Operator | None:
    """Adds an operator. Returns None if the name already exists."""
    added = await tx.execute(insert_if_new(tx, operators, [row]).returning(operators))
    inserted = added.first()
    return _operator(inserted) if inserted else None


async def operator_by_hash(tx: Tx, key_hash: str) -> Operator | None:
    row = (await tx.execute(select(operators).where(operators.c.key_hash == key_hash))).first()
    return _operator(row) if row else None


async def all_operators(tx: Tx) -> list[Operator]:
    query = (
        select(operators)
        .order_by(operators.c.created_at, operators.c.id)
        .limit(OPERATORS_LISTED_MAX)
    )
    return [_operator(row) for row in await tx.execute(query)]


async def revoke_operator(tx: Tx, name: str, now: datetime) -> None:
    good = update(operators).where(operators.c.name == name, operators.c.revoked_at.is_(None))
    await tx.execute(good.values(revoked_at=now))


async def operator_by_id(tx: Tx, operator_id: UUID) -> Operator | None:
    row = (await tx.execute(select(operators).where(operators.c.id == operator_id))).first()
    return _operator(row) if row else None


async def set_operator_role(tx: Tx, operator_id: UUID, role: Role) -> Operator | None:
    changed = update(operators).where(operators.c.id == operator_id).values(role=role)
    row = (await tx.execute(changed.returning(operators))).first()
    return _operator(row) if row else None


async def operator_by_name(tx: Tx, name: str) -> Operator | None:
    row = (await tx.execute(select(operators).where(operators.c.name == name))).first()
    return _operator(row) if row else None


async def note_operator_use(tx: Tx, operator_id: UUID, now: datetime) -> None:
    used = operators.c.last_used_at
    await tx.execute(
        update(operators)
        .where(
            operators.c.id == operator_id,
            or_(used.is_(None), used <= now - OPERATOR_USE_NOTED_EVERY),
        )
        .values(last_used_at=now)
    )


def _operator(row: Row[Any]) -> Operator:
    return _operator_of(row._mapping)


def _operator_of(row: Mapping[Any, Any]) -> Operator:
    values = {name: value for name, value in row.items() if name != "key_hash"}
    return Operator(**{**values, "role": Role(values["role"])})


_SESSION_PARTS = (("", sessions), ("key_", api_keys), ("owner_", tenants), ("operator_", operators))
_SESSION_COLUMNS = [[column.name for column in table.c] for _, table in _SESSION_PARTS]
_SESSION_BY_HASH = PreparedStatement(
    lambda tx: (
        select(
            *(
                column.label(f"{prefix}of_{column.name}")
                for prefix, table in _SESSION_PARTS
                for column in table.c
            )
        )
        .select_from(sessions)
        .outerjoin(api_keys, api_keys.c.id == sessions.c.api_key_id)
        .outerjoin(tenants, tenants.c.id == api_keys.c.tenant_id)
        .outerjoin(operators, operators.c.id == sessions.c.operator_id)
        .where(sessions.c.secret_hash == bindparam("of_hash"))
    )
)


class SessionRow(NamedTuple):
    """A session with its key, tenant and operator."""

    values: Mapping[str, Any]
    key: ApiKey | None
    tenant: Tenant | None
    operator: Operator | None


async def session_by_hash(tx: Tx, secret_hash: str) -> SessionRow | None:
    rows = await _SESSION_BY_HASH.tuples(tx, {"of_hash": secret_hash})
    if not rows:
        return None
    values, key, owner, operator = in_parts(rows[0], *_SESSION_COLUMNS)
    return SessionRow(
        values,
        _key_of(key) if key["id"] else None,
        Tenant(**owner) if owner["id"] else None,
        _operator_of(operator) if operator["id"] else None,
    )


async def add_session(tx: Tx, row: Mapping[str, Any]) -> None:
    await tx.execute(insert(sessions).values(dict(row)))


async def replace_session(tx: Tx, secret_hash: str, values: Mapping[str, Any]) -> bool:
    """Changes the secret and other values of a session. Returns False if the session has ended."""
    changed = update(sessions).where(sessions.c.secret_hash == secret_hash).values(dict(values))
    return (await tx.execute(changed.returning(sessions.c.id))).first() is not None


async def has_session(tx: Tx, session_id: UUID, key_id: UUID, now: datetime) -> bool:
    """Checks whether a customer is still signed in to this session with this key."""
    query = select(sessions.c.id).where(
        sessions.c.id == session_id,
        sessions.c.api_key_id == key_id,
        sessions.c.customer_until > now,
    )
    return (await tx.execute(query)).first() is not None


async def delete_session(tx: Tx, secret_hash: str) -> None:
    await tx.execute(delete(sessions).where(sessions.c.secret_hash == secret_hash))


async def delete_expired_sessions(tx: Tx, *, before: datetime, limit: int) -> None:
    expired = select(sessions.c.id).where(sessions.c.expires_at <= before).limit(limit)
    await tx.execute(delete(sessions).where(sessions.c.id.in_(expired)))


async def delete_oldest_sessions(
    tx: Tx, *, key_id: UUID | None, operator_id: UUID | None, kept: int
) -> None:
    """Deletes all but the newest sessions of a key or an operator. Without both, applies to the
    first owner."""
    if key_id is not None:
        same = sessions.c.api_key_id == key_id
    elif operator_id is not None:
        same = sessions.c.operator_id == operator_id
    else:
        same = sessions.c.admin_proof.is_not(None)
    newest = select(sessions.c.id).where(same).order_by(sessions.c.created_at.desc()).limit(kept)
    await tx.execute(delete(sessions).where(same, sessions.c.id.not_in(newest)))


async def list_balances(
    tx: Tx, tenant_id: UUID, *, after_user_id: UUID | None, limit: int
) -> list[tuple[UUID, int]]:
    query = select(wallets.c.user_id, wallets.c.balance).where(wallets.c.tenant_id == tenant_id)
    if after_user_id is not None:
        query = query.where(wallets.c.user_id > after_user_id)
    rows = await tx.execute(query.order_by(wallets.c.user_id).limit(limit))
    return [(row.user_id, row.balance) for row in rows]


async def get_wallet(tx: Tx, tenant_id: UUID, user_id: UUID) -> TokenWallet | None:
    row = (await tx.execute(select(wallets).where(_is_wallet(tenant_id, user_id)))).first()
    return _wallet(row) if row else None


_IS_BOUND = and_(
    wallets.c.tenant_id == bindparam("of_tenant"), wallets.c.user_id == bindparam("of_user")
)
# On PostgreSQL, an UPDATE without changes, which locks the row and changes its version (xmin).
_LOCK_WALLET = PreparedStatement(
    lambda tx: (
        select(wallets).where(_IS_BOUND)
        if is_sqlite(tx)
        else update(wallets).where(_IS_BOUND).values(balance=wallets.c.balance).returning(wallets)
    )
)


async def lock_wallet(tx: Tx, tenant_id: UUID, user_id: UUID) -> TokenWallet | None:
    row = await _LOCK_WALLET.first(tx, {"of_tenant": tenant_id, "of_user": user_id})
    return TokenWallet(**row) if row else None


async def open_wallet(tx: Tx, tenant_id: UUID, user_id: UUID, now: datetime) -> None:
    row = {"tenant_id": tenant_id, "user_id": user_id, "balance": 0, "created_at": now}
    await tx.execute(insert_if_new(tx, wallets, [row]))


async def debit(
    tx: Tx, tenant_id: UUID, user_id: UUID, amount: int, job_ids: Collection[UUID]
) -> int | None:
    """Takes tokens from the wallet and returns the new balance. Returns None if the balance is too
    low, or if one of the jobs already has a reservation."""
    values = {"of_tenant": tenant_id, "of_user": user_id, "amount_taken": amount}
    if len(job_ids) == 1:
        row = await _DEBIT.first(tx, {**values, "of_job": next(iter(job_ids))})
        return row["balance"] if row else None
    statement = debit_statement(is_one_of(tx, lines.c.job_id, job_ids))
    balance: int | None = (await tx.execute(statement, values)).scalar_one_or_none()
    return balance


def version_of_wallet() -> ColumnElement[Any]:
    """Selects the version (xmin) of the bound wallet on PostgreSQL. Every change and every lock
    replaces it."""
    return select(literal_column("token_wallets.xmin")).where(_IS_BOUND).scalar_subquery()


def is_unchanged(seen: FromClause) -> ColumnElement[bool]:
    """Returns an UPDATE condition that holds only if the wallet's version has not changed since it
    was read."""
    return literal_column("token_wallets.xmin") == select(seen.c.version).scalar_subquery()


def debit_statement(is_of_jobs: ColumnElement[bool]) -> Any:
    """Builds a statement that takes `amount_taken` from the wallet if the balance is sufficient and
    the job has no reservation yet."""
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


_DEBIT = PreparedStatement(lambda tx: debit_statement(lines.c.job_id == bindparam("of_job")))


async def credit(tx: Tx, tenant_id: UUID, user_id: UUID, amount: int) -> int:
    statement = (
        update(wallets)
        .where(_is_wallet(tenant_id, user_id))
        .values(balance=wallets.c.balance + amount)
        .returning(wallets.c.balance)
    )
    balance: int = (await tx.execute(statement)).scalar_one()
    return balance


async def claim_payment(tx: Tx, payment: PaymentClaim, now: datetime) -> PaymentClaim:
    """Stores a payment if its id is new. Returns the payment stored under this id."""
    row = {**payment._asdict(), "created_at": now}
    await tx.execute(insert_if_new(tx, payments, [row]))
    columns = [payments.c[name] for name in PaymentClaim._fields]
    has_id = payments.c.provider_transaction_id == payment.provider_transaction_id
    return PaymentClaim(*(await tx.execute(select(*columns).where(has_id))).one())


_ADD_TRANSACTION = PreparedInsert(
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


async def add_transaction(tx: Tx, rows: Sequence[Mapping[str, Any]]) -> int:
    """Adds transactions and returns how many of them are new."""
    whole = [{"job_id": None, "provider_transaction_id": None, **row} for row in rows]
    return len(await _ADD_TRANSACTION.add(tx, whole))


def consumption(
    tx: Tx, tenant_id: ColumnElement[Any], job_id: ColumnElement[Any], now: ColumnElement[Any]
) -> Any:
    """Builds an INSERT that consumes a job's reservation. It can be part of another statement."""
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


_CONSUME = PreparedStatement(
    lambda tx: consumption(
        tx, bindparam("of_tenant"), bindparam("of_job"), bindparam("settled_at", type_=Moment)
    )
)


def consume_call(tenant_id: UUID, job_id: UUID, now: datetime) -> StatementCall:
    """Builds a call that consumes a reservation. It has no effect if there is no reservation, or if
    the job was settled before."""
    return _CONSUME, {"of_tenant": tenant_id, "of_job": job_id, "settled_at": now}


async def transaction_of_payment(
    tx: Tx, tenant_id: UUID, provider_id: str
) -> LedgerTransaction | None:
    query = select(lines).where(
        lines.c.tenant_id == tenant_id, lines.c.provider_transaction_id == provider_id
    )
    row = (await tx.execute(query)).first()
    return _transaction(row) if row else None


async def transactions_of_jobs(
    tx: Tx, tenant_id: UUID, job_ids: Collection[UUID], types: Collection[TransactionType]
) -> list[LedgerTransaction]:
    query = (
        select(lines)
        .where(
            lines.c.tenant_id == tenant_id,
            is_one_of(tx, lines.c.job_id, job_ids),
            lines.c.type.in_(types),
        )
        .order_by(lines.c.id)
    )
    return [_transaction(row) for row in await tx.execute(query)]


async def sums_by_type(
    tx: Tx, tenant_id: UUID, user_id: UUID, *, since: datetime, limit: int
) -> dict[TransactionType, int]:
    """Sums the user's newest transactions by type. For JOB_CONSUME, sums the total cost of the
    jobs."""
    newest = (
        select(lines)
        .where(lines.c.tenant_id == tenant_id, lines.c.user_id == user_id)
        .order_by(lines.c.id.desc())
        .limit(limit)
        .subquery()
    )
    reserved = lines.alias("reserved")
    is_reserved = and_(
        reserved.c.tenant_id == newest.c.tenant_id,
        reserved.c.job_id == newest.c.job_id,
        reserved.c.type == TransactionType.JOB_RESERVE,
        newest.c.type == TransactionType.JOB_CONSUME,
    )
    total = func.sum(newest.c.amount + func.coalesce(reserved.c.amount, 0))
    query = (
        select(newest.c.type, total.label("total"))
        .select_from(newest.outerjoin(reserved, is_reserved))
        .where(newest.c.created_at >= since)
        .group_by(newest.c.type)
    )
    return {TransactionType(row.type): int(row.total) for row in await tx.execute(query)}


async def newest_transactions(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    *,
    before_id: int | None,
    limit: int,
    types: Collection[TransactionType] = (),
) -> list[LedgerTransaction]:
    query = (
        select(lines)
        .where(lines.c.tenant_id == tenant_id, lines.c.user_id == user_id)
        .order_by(lines.c.id.desc())
        .limit(limit)
    )
    if before_id is not None:
        query = query.where(lines.c.id < before_id)
    if types:
        query = query.where(lines.c.type.in_(sorted(types)))
    return [_transaction(row) for row in await tx.execute(query)]


async def unbalanced_wallets(tx: Tx, tenant_id: UUID | None) -> list[Row[Any]]:
    """Returns wallets with a negative balance, or with a balance that differs from the sum of their
    transactions.

    A single statement reads both tables, so that they are consistent."""
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


async def transactions_without_wallet(tx: Tx, tenant_id: UUID | None) -> list[Row[Any]]:
    wallet = select(wallets.c.balance).where(
        wallets.c.tenant_id == lines.c.tenant_id, wallets.c.user_id == lines.c.user_id
    )
    query = _sums().where(~wallet.exists())
    if tenant_id is not None:
        query = query.where(lines.c.tenant_id == tenant_id)
    return list(await tx.execute(query))


async def unmatched_transactions(tx: Tx, tenant_id: UUID | None) -> list[Row[Any]]:
    """Returns jobs that were settled twice, have no reservation, were refunded with another amount,
    or got more unused tokens back than were reserved."""
    is_reserve = lines.c.type == TransactionType.JOB_RESERVE
    is_refund = lines.c.type == TransactionType.JOB_REFUND
    reserves = func.count().filter(is_reserve)
    settled = func.count().filter(lines.c.type.in_(SETTLES))
    reserved = func.coalesce(-func.sum(lines.c.amount).filter(is_reserve), 0)
    refunded = func.coalesce(func.sum(lines.c.amount).filter(is_refund), 0)
    is_consumed = lines.c.type == TransactionType.JOB_CONSUME
    unused = func.coalesce(func.sum(lines.c.amount).filter(is_consumed), 0)
    query = (
        select(
            lines.c.tenant_id,
            lines.c.job_id,
            func.count(lines.c.user_id.distinct()).label("payers"),
            reserves.label("reserves"),
            settled.label("settled"),
            reserved.label("reserved"),
            refunded.label("refunded"),
            unused.label("unused"),
        )
        .where(lines.c.job_id.is_not(None))
        .group_by(lines.c.tenant_id, lines.c.job_id)
        .having(
            or_(
                settled > 1,
                reserves != 1,
                func.count(lines.c.user_id.distinct()) > 1,
                and_(refunded > 0, refunded != reserved),
                unused > reserved,
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


def _is_wallet(tenant_id: UUID, user_id: UUID) -> ColumnElement[bool]:
    return and_(wallets.c.tenant_id == tenant_id, wallets.c.user_id == user_id)


def _wallet(row: Row[Any]) -> TokenWallet:
    return TokenWallet(**row._mapping)


def _transaction(row: Row[Any]) -> LedgerTransaction:
    return LedgerTransaction(**{**row._mapping, "type": TransactionType(row.type)})
