"""Operators' routes for tenants, users, keys and wallets, and for verifying the ledger."""

from dataclasses import asdict
from typing import Annotated, Any
from uuid import UUID, uuid4

from fastapi import Query, Response, status
from pydantic import AwareDatetime, Field

from comfyfleet.api.admin import (
    SHOWN_DRIFTS_MAX,
    AdminKeyAnswer,
    AdminKeys,
    AdminMadeKey,
    AdminTransactionAnswer,
    AdminTransactions,
    AdminWalletAnswer,
    AdminWallets,
    Balance,
    Books,
    DriftAnswer,
    MadeTenant,
    StoppedWork,
    Storage,
    TenantAnswer,
    TenantPrompts,
    Tenants,
    TenantWork,
    UserAnswer,
    Users,
    WorkItemAnswer,
    WorkKind,
)
from comfyfleet.api.values import ROW_ID_MAX
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.http.admin.auth import (
    Body,
    OperatorDep,
    OwnerDep,
    admin_router,
)
from comfyfleet.server.http.deps import NowDep, PlaneDep
from comfyfleet.server.http.request_body import INTEGER_MAX, Tokens
from comfyfleet.server.maintenance import checks, retention
from comfyfleet.server.maintenance.retention import count_unnamed
from comfyfleet.server.media import service as media
from comfyfleet.server.notifications.service import record_audit
from comfyfleet.server.pipelines.run_state import wake_runs_of
from comfyfleet.server.tenant_work import actions as tenant_work
from comfyfleet.server.tenants import actions as tenant_actions
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants import wallet as ledger
from comfyfleet.server.tenants.model import (
    ALL_SCOPES,
    PRIORITY_MAX,
    PRIORITY_MIN,
    ApiKey,
    LedgerTransaction,
    NewApiKey,
    PaymentClaim,
    Scope,
    Tenant,
    User,
    check_tenant_name,
    new_api_key,
)
from comfyfleet.server.tenants.service import USERS_PER_PAGE_MAX
from comfyfleet.server.tenants.wallet import TRANSACTIONS_PER_PAGE_MAX

router = admin_router()
FIRST_KEY = "first key"


class NewTenant(Body):
    name: str = Field(description="A display name.", examples=["Ada's films"])
    email: str | None = Field(
        default=None, description="The first user's email address.", examples=["ada@example.com"]
    )


class Limits(Body):
    min_priority: int = Field(
        default=PRIORITY_MIN, description="Minimum job priority. Lower values are raised to it."
    )
    max_priority: int = Field(
        default=PRIORITY_MAX, description="Maximum job priority. Higher values are lowered to it."
    )
    max_queued: int | None = Field(
        default=None,
        le=INTEGER_MAX,
        description="Maximum number of queued jobs. null means COMFYFLEET_MAX_QUEUED_PER_TENANT.",
    )


class Retention(Body):
    retention_days: int | None = Field(
        description="Days after which media and files are deleted. null means "
        "COMFYFLEET_RETENTION_DAYS.",
        examples=[30],
    )


class Quota(Body):
    max_storage_bytes: Annotated[int, Field(ge=0, le=ROW_ID_MAX)] | None = Field(
        description="Maximum bytes of storage. null means COMFYFLEET_MAX_STORAGE_BYTES_PER_TENANT.",
        examples=[50 * 1024**3],
    )


class ShowBackends(Body):
    show_backends: bool | None = Field(
        description="Whether the tenant's users see machines. null means COMFYFLEET_SHOW_BACKENDS."
    )


@router.post("/tenants", status_code=status.HTTP_201_CREATED, name="create")
async def create_tenant(
    body: NewTenant, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> MadeTenant:
    """Creates a tenant with a first user and the user's key, which is shown only once.

    The user is stored first. If a later step fails, a user without a key remains.
    """
    name, tenant_id, user_id, key = check_tenant_name(body.name), uuid4(), uuid4(), new_api_key()
    async with plane.central.read() as tx:
        pool = await tenants.emptiest_pool(tx, plane.pools)
    async with plane.pools[pool].transaction() as tx:
        await tenants.create_user(
            tx, user_id=user_id, tenant_id=tenant_id, email=body.email, now=now
        )
    async with plane.central.transaction() as tx:
        tenant = await tenants.create_tenant(tx, tenant_id=tenant_id, name=name, pool=pool, now=now)
        await tenants.create_key(
            tx, NewApiKey(uuid4(), key, tenant_id, user_id, FIRST_KEY), now=now
        )
        details = {"name": tenant.name, "pool": pool, "user_id": user_id}
        await record_audit(tx, operator, "create_tenant", tenant.subject, now, tenant_id, **details)
    return MadeTenant(id=tenant.id, name=tenant.name, pool=pool, key=key, user_id=user_id)


@router.get("/tenants")
async def list_tenants(plane: PlaneDep) -> Tenants:
    async with plane.central.read() as tx:
        return Tenants(tenants=[answer_of(tenant) for tenant in await tenants.list_tenants(tx)])


@router.get("/tenants/{tenant_id}", name="show")
async def show_tenant(tenant_id: UUID, plane: PlaneDep) -> TenantAnswer:
    async with plane.central.read() as tx:
        return answer_of(await tenants.get_tenant(tx, tenant_id))


@router.put("/tenants/{tenant_id}/limits")
async def set_limits(
    tenant_id: UUID, body: Limits, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> TenantAnswer:
    """Sets a tenant's limits for priorities and queued jobs. Queued jobs keep their priority."""
    async with plane.central.transaction() as tx:
        tenant = await tenants.set_limits(tx, tenant_id, **body.model_dump())
        await record_audit(
            tx, operator, "set_limits", tenant.subject, now, tenant.id, **body.model_dump()
        )
    return answer_of(tenant)


@router.put("/tenants/{tenant_id}/retention")
async def set_retention(
    tenant_id: UUID, body: Retention, plane: PlaneDep, now: NowDep, owner: OwnerDep
) -> TenantAnswer:
    """Sets how many days a tenant's media and files are kept. The ledger isn't affected. Requires
    an owner."""
    async with plane.central.transaction() as tx:
        tenant = await tenants.set_retention(tx, tenant_id, body.retention_days)
        await record_audit(
            tx, owner, "set_retention", tenant.subject, now, tenant.id, **body.model_dump()
        )
    return answer_of(tenant)


@router.put("/tenants/{tenant_id}/quota")
async def set_quota(
    tenant_id: UUID, body: Quota, plane: PlaneDep, now: NowDep, owner: OwnerDep
) -> TenantAnswer:
    """Sets a tenant's storage limit in bytes. Announced uploads count toward it. Requires an
    owner."""
    async with plane.central.transaction() as tx:
        tenant = await tenants.set_quota(tx, tenant_id, body.max_storage_bytes)
        await record_audit(
            tx, owner, "set_quota", tenant.subject, now, tenant.id, **body.model_dump()
        )
    return answer_of(tenant)


@router.put("/tenants/{tenant_id}/show-backends")
async def set_show_backends(
    tenant_id: UUID, body: ShowBackends, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> TenantAnswer:
    """Sets whether a tenant's users see machine names, tracebacks and devices."""
    return answer_of(
        await tenant_actions.show_backends(
            plane.central, tenant_id, show=body.show_backends, operator=operator, now=now
        )
    )


@router.get("/tenants/{tenant_id}/storage")
async def storage(
    tenant_id: UUID,
    plane: PlaneDep,
    unnamed: Annotated[
        bool, Query(description="Whether to count objects that no database row refers to.")
    ] = False,
) -> Storage:
    async with plane.central.read() as tx:
        tenant = await tenants.get_tenant(tx, tenant_id)
    async with plane.pools[tenant.pool].transaction() as tx:
        used = await media.used_bytes(tx, tenant_id)
    own, usual = tenant.max_storage_bytes, plane.settings.max_storage_bytes_per_tenant
    storage = Storage(used_bytes=used, max_storage_bytes=usual if own is None else own)
    if not unnamed:
        return storage
    count, is_complete = await count_unnamed(plane.context, tenant_id)
    return storage.model_copy(update={"unnamed_objects": count, "is_complete": is_complete})


class WantedTenantPrompts(TenantPrompts, Body):
    """The complete settings. Omitted fields are reset to their defaults."""


@router.get("/tenants/{tenant_id}/prompts")
async def show_prompts(tenant_id: UUID, plane: PlaneDep) -> TenantPrompts:
    """Returns the fleets and node types that the tenant's ComfyUI clients may use."""
    async with plane.central.read() as tx:
        return (await tenants.get_tenant(tx, tenant_id)).prompts


@router.put("/tenants/{tenant_id}/prompts")
async def set_prompts(
    tenant_id: UUID, body: WantedTenantPrompts, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> TenantPrompts:
    """Sets the fleets and node types that the tenant's ComfyUI clients may use. Prompts that are
    already queued aren't affected."""
    async with plane.central.transaction() as tx:
        for name in body.fleets or ():
            await fleets.get_fleet(tx, *name.split("/"))
        tenant = await tenants.set_prompts(tx, tenant_id, body)
        details = tenant.prompts.model_dump(mode="json")
        await record_audit(tx, operator, "set_prompts", tenant.subject, now, tenant.id, **details)
    return tenant.prompts


def answer_of(tenant: Tenant) -> TenantAnswer:
    return TenantAnswer(**asdict(tenant))


@router.post("/tenants/{tenant_id}/erase", status_code=status.HTTP_202_ACCEPTED)
async def erase(tenant_id: UUID, plane: PlaneDep, now: NowDep, operator: OwnerDep) -> TenantAnswer:
    """Erases a tenant's files, media, prompts, properties, events, webhooks and keys, but not the
    ledger. This can't be undone. Requires an owner.

    The tenant's keys become invalid immediately, no new jobs are accepted, and active jobs are
    canceled and refunded. A sweep then deletes the data and sets the tenant's `erased_at`.
    """
    return answer_of(
        await retention.begin_erasure(plane.context, tenant_id, actor=operator, now=now)
    )


@router.get("/ledger")
async def verify(
    plane: PlaneDep,
    tenant_id: Annotated[UUID | None, Query(description="Only verify this tenant.")] = None,
) -> Books:
    """Verifies that wallets match their transactions, and transactions their jobs, without changing
    anything."""
    verified = await checks.verify_ledger(plane.context, tenant_id)
    shown = [
        DriftAnswer.model_validate(
            {name: getattr(drift, name) for name in DriftAnswer.model_fields}
        )
        for drift in verified.drifts[:SHOWN_DRIFTS_MAX]
    ]
    return Books(
        is_sound=verified.is_sound,
        found=len(verified.drifts),
        drifts=shown,
        pools_left_out=sorted(verified.pools_left_out),
    )


USERS = "/tenants/{tenant_id}/users"
USER = USERS + "/{user_id}"


class NewUser(Body):
    email: str | None = Field(default=None, examples=["bob@example.com"])
    name: str | None = Field(default=None, examples=["Bob"])


class AdminWantedKey(Body):
    name: str = Field(default="key", description="A display name.", examples=["website"])
    scopes: list[Scope] = Field(
        default_factory=lambda: sorted(ALL_SCOPES), description="The key's permissions."
    )
    expires_at: AwareDatetime | None = Field(
        default=None, description="When the key expires. null means never."
    )


@router.post(USERS, status_code=status.HTTP_201_CREATED, name="create")
async def create_user(
    tenant_id: UUID, body: NewUser, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> UserAnswer:
    """Creates a user without a key. Use …/users/{user_id}/keys to create one."""
    async with plane.central.read() as tx:
        pool = plane.pools[(await tenants.require_kept(tx, tenant_id)).pool]
    new = tenant_actions.UserToCreate(uuid4(), tenant_id, body.email, body.name)
    user = await tenant_actions.create_user(plane.central, pool, new, operator=operator, now=now)
    return _user_answer(user)


@router.get(USERS)
async def list_users(
    tenant_id: UUID,
    plane: PlaneDep,
    after: Annotated[UUID | None, Query(description="Only users after this one.")] = None,
    limit: Annotated[int, Query(ge=1, le=USERS_PER_PAGE_MAX)] = 100,
) -> Users:
    async with plane.context.tenant(tenant_id) as tx:
        users = await tenants.list_users(tx, tenant_id, after_id=after, limit=limit)
    following = users[-1].id if len(users) == limit else None
    return Users(users=[_user_answer(user) for user in users], next=following)


@router.get(USER, name="show")
async def show_user(tenant_id: UUID, user_id: UUID, plane: PlaneDep) -> UserAnswer:
    return _user_answer(await _user(plane, tenant_id, user_id))


@router.post(USER + "/deactivate")
async def deactivate(
    tenant_id: UUID, user_id: UUID, plane: PlaneDep, operator: OperatorDep
) -> UserAnswer:
    """Deactivates a user and revokes all their keys. Their graph runs and pipeline runs are
    stopped, their triggers paused, and their queued and running jobs canceled and refunded."""
    scope = tenant_work.WorkOwner(tenant_id, user_id)
    user = await tenant_work.deactivate_user(plane.graphs, scope, actor=operator)
    return _user_answer(user)


@router.post(USER + "/activate")
async def activate(
    tenant_id: UUID, user_id: UUID, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> UserAnswer:
    """Reactivates a user. Revoked keys stay revoked, and stopped runs and paused triggers aren't
    resumed."""
    pool = await plane.context.pool_of(tenant_id)
    user = await tenant_actions.activate_user(
        plane.central, pool, tenant_id, user_id, operator=operator, now=now
    )
    return _user_answer(user)


WORK = "/tenants/{tenant_id}/work"
WorkUser = Annotated[UUID | None, Query(description="Only this user's work.")]


class WorkScope(Body):
    user_id: UUID | None = Field(
        default=None, description="Only this user's work. The default is all users."
    )


@router.get(WORK, name="work")
async def list_work(tenant_id: UUID, plane: PlaneDep, user_id: WorkUser = None) -> TenantWork:
    """Lists a tenant's unfinished graph runs and pipeline runs, and its triggers."""
    items = await tenant_work.list_work(plane.graphs, tenant_work.WorkOwner(tenant_id, user_id))
    return TenantWork(items=[WorkItemAnswer(**item._asdict()) for item in items])


@router.post(WORK + "/stop", name="stop_work")
async def stop_work(
    tenant_id: UUID, body: WorkScope, plane: PlaneDep, operator: OperatorDep
) -> StoppedWork:
    """Stops all graph runs and pipeline runs, at most 100 per call, and pauses all triggers.
    Running jobs are canceled and refunded."""
    scope = tenant_work.WorkOwner(tenant_id, body.user_id)
    return _stopped(await tenant_work.stop_all(plane.graphs, scope, actor=operator))


@router.post(WORK + "/pause", name="pause_work")
async def pause_work(
    tenant_id: UUID, body: WorkScope, plane: PlaneDep, operator: OperatorDep
) -> StoppedWork:
    """Pauses all triggers and runs, at most 100 runs per call. Submitted jobs continue."""
    scope = tenant_work.WorkOwner(tenant_id, body.user_id)
    return _stopped(await tenant_work.pause_all(plane.graphs, scope, actor=operator))


@router.post(WORK + "/{kind}/{item_id}/stop", name="stop_item")
async def stop_item(
    tenant_id: UUID, kind: WorkKind, item_id: UUID, plane: PlaneDep, operator: OperatorDep
) -> WorkItemAnswer:
    """Stops a run and refunds its jobs, or pauses a trigger. Repeated calls have no effect."""
    item = await tenant_work.stop_item(plane.graphs, tenant_id, kind, item_id, actor=operator)
    return WorkItemAnswer(**item._asdict())


@router.post(WORK + "/{kind}/{item_id}/pause", name="pause_item")
async def pause_item(
    tenant_id: UUID, kind: WorkKind, item_id: UUID, plane: PlaneDep, operator: OperatorDep
) -> WorkItemAnswer:
    """Pauses a run or a trigger."""
    item = await tenant_work.pause_item(plane.graphs, tenant_id, kind, item_id, actor=operator)
    return WorkItemAnswer(**item._asdict())


def _stopped(stopped: tenant_work.Stopped) -> StoppedWork:
    return StoppedWork(
        graph_runs=stopped.counts.get(WorkKind.GRAPH_RUN, 0),
        pipeline_runs=stopped.counts.get(WorkKind.PIPELINE_RUN, 0),
        triggers=stopped.counts.get(WorkKind.TRIGGER, 0),
        has_more=stopped.has_more,
    )


@router.post(USER + "/keys", status_code=status.HTTP_201_CREATED)
async def create_key(
    tenant_id: UUID,
    user_id: UUID,
    body: AdminWantedKey,
    plane: PlaneDep,
    now: NowDep,
    operator: OperatorDep,
) -> AdminMadeKey:
    """Creates an API key. It is shown only once, because only a hash is stored."""
    user, key = await _user(plane, tenant_id, user_id), new_api_key()
    new = NewApiKey(uuid4(), key, tenant_id, user_id, body.name, body.scopes, body.expires_at)
    async with plane.central.transaction() as tx:
        await tenants.require_kept(tx, tenant_id)
        created = await tenants.create_key(tx, new, now=now)
        await record_audit(
            tx, operator, "create_key", user.subject, now, tenant_id, **_key_details(created)
        )
    return AdminMadeKey(**_key_answer(created).model_dump(), key=key)


@router.get(USER + "/keys")
async def list_keys(tenant_id: UUID, user_id: UUID, plane: PlaneDep) -> AdminKeys:
    await _user(plane, tenant_id, user_id)
    async with plane.central.read() as tx:
        keys = await tenants.list_keys(tx, tenant_id, user_id)
    return AdminKeys(keys=[_key_answer(key) for key in keys])


@router.post(USER + "/keys/{key_id}/revoke")
async def revoke_key(
    tenant_id: UUID,
    user_id: UUID,
    key_id: UUID,
    plane: PlaneDep,
    now: NowDep,
    operator: OperatorDep,
) -> AdminKeyAnswer:
    """Revokes an API key immediately. Repeated calls have no effect."""
    user = await _user(plane, tenant_id, user_id)
    async with plane.central.transaction() as tx:
        revoked = await tenants.revoke_key(tx, tenant_id, user_id, key_id, now=now)
        await record_audit(
            tx, operator, "revoke_key", user.subject, now, tenant_id, **_key_details(revoked)
        )
    return _key_answer(revoked)


async def _user(plane: ControlPlane, tenant_id: UUID, user_id: UUID) -> User:
    async with plane.context.tenant(tenant_id) as tx:
        return await tenants.get_user(tx, tenant_id, user_id)


def _key_details(key: ApiKey) -> dict[str, Any]:
    return {"key_id": key.id, "prefix": key.prefix, "scopes": key.scopes}


def _user_answer(user: User) -> UserAnswer:
    return UserAnswer(**asdict(user))


def _key_answer(key: ApiKey) -> AdminKeyAnswer:
    shown = {name: getattr(key, name) for name in AdminKeyAnswer.model_fields}
    return AdminKeyAnswer.model_validate({**shown, "scopes": sorted(key.scopes)})


WALLET = "/tenants/{tenant_id}/wallets/{user_id}"
Before = Annotated[
    int | None, Query(ge=1, le=2**63 - 1, description="Only transactions with a lower id.")
]


REASON_CHARACTERS_MAX = 500


class Payment(Body):
    amount: Tokens = Field(description="The number of tokens, above zero.", examples=[500])
    provider_transaction_id: str = Field(
        description="The payment provider's id. Each id can be used only once.",
        examples=["pi_3PqK2x"],
    )
    reason: Annotated[str, Field(max_length=REASON_CHARACTERS_MAX)] | None = Field(
        default=None,
        description="The reason, for the audit log.",
        examples=["refund of a wrong picture"],
    )


@router.post(
    WALLET + "/credits",
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": Balance, "description": "The payment was already credited."}},
)
async def credit(
    tenant_id: UUID,
    user_id: UUID,
    body: Payment,
    plane: PlaneDep,
    now: NowDep,
    operator: OwnerDep,
    response: Response,
) -> Balance:
    """Credits a payment to a user's wallet. Each payment id can be used only once in the whole
    installation. Requires an owner.

    Repeated calls return the balance. If the id was already used with another tenant, user or
    amount, the response is 409.
    """
    pool = await plane.context.pool_of(tenant_id)
    payment = PaymentClaim(body.provider_transaction_id, tenant_id, user_id, body.amount)
    credited = await tenant_actions.credit_payment(
        plane.central, pool, payment, operator=operator, reason=body.reason, now=now
    )
    if not credited.is_new:
        response.status_code = status.HTTP_200_OK
    await wake_runs_of(plane.context, tenant_id, user_id)
    return Balance(balance=credited.balance)


@router.get("/tenants/{tenant_id}/wallets")
async def list_wallets(
    tenant_id: UUID,
    plane: PlaneDep,
    after: Annotated[UUID | None, Query(description="Only users after this one.")] = None,
    limit: Annotated[int, Query(ge=1, le=USERS_PER_PAGE_MAX)] = 100,
) -> AdminWallets:
    """Lists the balances of all users who have ever had tokens, ordered by user id."""
    async with plane.context.tenant(tenant_id) as tx:
        balances = await ledger.balances(tx, tenant_id, after_user_id=after, limit=limit)
    wallets = [
        AdminWalletAnswer(tenant_id=tenant_id, user_id=user_id, balance=balance)
        for user_id, balance in balances
    ]
    return AdminWallets(wallets=wallets, next=balances[-1][0] if len(balances) == limit else None)


@router.get(WALLET, name="show")
async def show_wallet(tenant_id: UUID, user_id: UUID, plane: PlaneDep) -> AdminWalletAnswer:
    async with plane.context.tenant(tenant_id) as tx:
        await tenants.get_user(tx, tenant_id, user_id)
        balance = await ledger.balance(tx, tenant_id, user_id)
    return AdminWalletAnswer(tenant_id=tenant_id, user_id=user_id, balance=balance)


@router.get(WALLET + "/transactions")
async def transactions(
    tenant_id: UUID,
    user_id: UUID,
    plane: PlaneDep,
    before: Before = None,
    limit: Annotated[int, Query(ge=1, le=TRANSACTIONS_PER_PAGE_MAX)] = 100,
) -> AdminTransactions:
    async with plane.context.tenant(tenant_id) as tx:
        await tenants.get_user(tx, tenant_id, user_id)
        entries = await ledger.transactions(tx, tenant_id, user_id, before_id=before, limit=limit)
    following = entries[-1].id if len(entries) == limit else None
    return AdminTransactions(
        transactions=[_transaction_answer(entry) for entry in entries], next=following
    )


def _transaction_answer(line: LedgerTransaction) -> AdminTransactionAnswer:
    fields = asdict(line)
    return AdminTransactionAnswer(
        **{name: fields[name] for name in AdminTransactionAnswer.model_fields}
    )
