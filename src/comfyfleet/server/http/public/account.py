"""Routes for a user's keys, wallet, webhooks and account."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Annotated
from uuid import UUID

from fastapi import Query, Request, status
from pydantic import AfterValidator, AwareDatetime, Field

from comfyfleet.api.account import (
    AccountAnswer,
    AccountLimits,
    AccountTenant,
    AccountUser,
    Deliveries,
    DeliveryAnswer,
    FoundEffect,
    FoundJob,
    FoundMedia,
    KeyAnswer,
    MadeKey,
    MadeWebhook,
    PublicKeys,
    SearchAnswer,
    TransactionAnswer,
    Transactions,
    TransactionType,
    WalletAnswer,
    WalletSummaryAnswer,
    WebhookAnswer,
    Webhooks,
    WebhookTest,
)
from comfyfleet.api.values import ROW_ID_MAX
from comfyfleet.errors import FleetError, NotFound, TooManyCalls, Unauthenticated
from comfyfleet.server import ingest
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.db import Tx
from comfyfleet.server.http.deps import NowDep, PlaneDep, problems
from comfyfleet.server.http.public.auth import (
    PAGE_USUAL,
    Body,
    KeyHolder,
    Limit,
    Reader,
    Text,
    Writer,
    public_router,
)
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.media import service as media
from comfyfleet.server.notifications import webhooks
from comfyfleet.server.notifications.model import (
    DeliveryStatus,
    RegisteredWebhook,
    WebhookDelivery,
    WebhookEvent,
)
from comfyfleet.server.notifications.service import record_audit
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants import sessions
from comfyfleet.server.tenants import wallet as ledger
from comfyfleet.server.tenants.model import (
    NAME_CHARACTERS_MAX,
    ApiKey,
    Caller,
    NewApiKey,
    Scope,
    new_api_key,
)
from comfyfleet.transport.ssrf import URL_CHARACTERS_MAX, parse_webhook_url

keys_router = public_router("keys")
Scopes = Annotated[
    list[Scope] | None,
    Field(
        min_length=1,
        max_length=10,
        description="The new key's scopes. The default is the scopes of the caller's key.",
        examples=[["read", "write"]],
    ),
]


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("this time is out of range after conversion to UTC") from None


class WantedKey(Body):
    name: Text = Field(
        min_length=1,
        max_length=NAME_CHARACTERS_MAX,
        description="A display name.",
        examples=["build server"],
    )
    scopes: Scopes = None
    expires_at: Annotated[AwareDatetime, AfterValidator(_in_utc)] | None = Field(
        default=None,
        description="When the key expires. null means never.",
        examples=["2031-01-01T00:00:00Z"],
    )


@keys_router.post("/keys", status_code=status.HTTP_201_CREATED, name="create")
async def create_key(body: WantedKey, plane: PlaneDep, now: NowDep, caller: KeyHolder) -> MadeKey:
    """Creates an API key. It can't have more scopes or a later expiry than the caller's key."""
    scopes = caller.key.scopes if body.scopes is None else frozenset(body.scopes)
    for scope in sorted(scopes - caller.key.scopes):
        caller.require(scope)
    key = new_api_key()
    new = NewApiKey(
        id=plane.context.new_id(),
        key=key,
        tenant_id=caller.tenant.id,
        user_id=caller.user_id,
        name=body.name,
        scopes=scopes,
        expires_at=_earlier(body.expires_at, caller.key.expires_at),
    )
    async with plane.central.transaction() as tx:
        created = await tenants.create_key(tx, new, now=now)
        await _audit(tx, caller, "create_key", f"key:{created.id}", now)
    try:
        await _require_still_valid(plane, caller)
    except FleetError:
        # The key may already be deleted if the tenant is being erased.
        with suppress(NotFound):
            async with plane.central.transaction() as tx:
                await tenants.revoke_key(
                    tx, created.tenant_id, created.user_id, created.id, now=now
                )
        raise
    return MadeKey(**_key_answer(created).model_dump(), key=key)


async def _require_still_valid(plane: ControlPlane, caller: Caller) -> None:
    """Checks that the caller's key wasn't revoked while a new key was created.

    This check must run after the new key is stored. Any later revocation finds the new key as well.
    """
    async with plane.central.read() as tx:
        is_valid = await sessions.is_caller_valid(tx, caller, now=plane.clock())
        is_valid = is_valid and (await tenants.get_tenant(tx, caller.tenant.id)).erasing_at is None
    if is_valid:
        async with plane.pools[caller.tenant.pool].read() as tx:
            is_valid = (await tenants.get_user(tx, caller.tenant.id, caller.user_id)).is_active
    if not is_valid:
        raise Unauthenticated("this key was revoked")


@keys_router.get("/keys")
async def list_keys(plane: PlaneDep, caller: KeyHolder) -> PublicKeys:
    async with plane.central.read() as tx:
        keys = await tenants.list_keys(tx, caller.tenant.id, caller.user_id)
    return PublicKeys(keys=tuple(map(_key_answer, keys)))


@keys_router.delete("/keys/{key_id}", responses=problems(404))
async def revoke(key_id: UUID, plane: PlaneDep, now: NowDep, caller: KeyHolder) -> KeyAnswer:
    """Revokes an API key immediately. Repeated calls have no effect."""
    async with plane.central.transaction() as tx:
        revoked = await tenants.revoke_key(tx, caller.tenant.id, caller.user_id, key_id, now=now)
        await _audit(tx, caller, "revoke_key", f"key:{revoked.id}", now)
    return _key_answer(revoked)


def _earlier(first: datetime | None, second: datetime | None) -> datetime | None:
    return min(filter(None, (first, second)), default=None)


async def _audit(tx: Tx, caller: Caller, action: str, subject: str, now: datetime) -> None:
    await record_audit(
        tx,
        caller.tenant.subject,
        action,
        subject,
        now,
        caller.tenant.id,
        user_id=caller.user_id,
        by_key=caller.key.id,
    )


def _key_answer(key: ApiKey) -> KeyAnswer:
    return KeyAnswer(
        id=key.id,
        name=key.name,
        prefix=key.prefix,
        scopes=tuple(sorted(key.scopes)),
        created_at=key.created_at,
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
        last_used_at=key.last_used_at,
    )


wallet_router = public_router("wallet")


@wallet_router.get("/wallet")
async def balance(plane: PlaneDep, caller: Reader) -> WalletAnswer:
    """Returns the balance of your wallet in tokens."""
    async with plane.pools[caller.tenant.pool].read() as tx:
        return WalletAnswer(balance=await ledger.balance(tx, caller.tenant.id, caller.user_id))


SUMMARY_DAYS = 30


def top_up_url(plane: ControlPlane, caller: Caller) -> str | None:
    url = plane.settings.top_up_url
    ids = {"tenant_id": caller.tenant.id, "user_id": caller.user_id}
    for name, value in ids.items():
        url = url.replace(f"{{{name}}}", str(value))
    return url if url.startswith(("https://", "http://")) else None


@wallet_router.get("/wallet/summary")
async def wallet_summary(
    plane: PlaneDep,
    now: NowDep,
    caller: Reader,
    days: Annotated[
        int, Query(ge=1, le=366, description="The number of days that the sums cover.")
    ] = SUMMARY_DAYS,
) -> WalletSummaryAnswer:
    """Returns the balance, the reserved tokens, and the tokens added, spent and refunded in the
    last `days` days."""
    tenant_id, user_id = caller.tenant.id, caller.user_id
    async with plane.pools[caller.tenant.pool].read() as tx:
        balance = await ledger.balance(tx, tenant_id, user_id)
        sums = await ledger.summary(tx, tenant_id, user_id, since=now - timedelta(days=days))
        reserved = await jobs.reserved_tokens(tx, tenant_id, user_id)
    return WalletSummaryAnswer(
        balance=balance,
        reserved_tokens=reserved,
        days=days,
        added_tokens=sums.added,
        spent_tokens=sums.spent,
        refunded_tokens=sums.refunded,
        top_up_url=top_up_url(plane, caller),
    )


@wallet_router.get("/wallet/transactions")
async def transactions(
    plane: PlaneDep,
    caller: Reader,
    type: Annotated[
        list[TransactionType] | None,
        Query(max_length=4, description="Only transactions of these types."),
    ] = None,
    before: Annotated[
        int | None, Query(ge=0, le=ROW_ID_MAX, description="Only transactions with a lower id.")
    ] = None,
    limit: Limit = PAGE_USUAL,
) -> Transactions:
    """Lists payments, reservations, consumptions and refunds, newest first. Their sum is the
    balance."""
    async with plane.pools[caller.tenant.pool].read() as tx:
        entries = await ledger.transactions(
            tx,
            caller.tenant.id,
            caller.user_id,
            before_id=before,
            limit=limit + 1,
            types=frozenset(type or ()),
        )
        page = entries[:limit]
        paid = await jobs.waiting_by_id(
            tx, caller.tenant.id, {entry.job_id for entry in page if entry.job_id}
        )
    return Transactions(
        transactions=tuple(
            TransactionAnswer(
                id=entry.id,
                type=entry.type,
                amount=entry.amount,
                job_id=entry.job_id,
                provider_transaction_id=entry.provider_transaction_id,
                effect_id=paid[entry.job_id].effect_id if entry.job_id in paid else None,
                video_id=paid[entry.job_id].video_id if entry.job_id in paid else None,
                created_at=entry.created_at,
            )
            for entry in page
        ),
        next=page[-1].id if len(entries) > limit else None,
    )


webhooks_router = public_router("webhooks")


class NewWebhook(Body):
    url: Text = Field(
        max_length=URL_CHARACTERS_MAX,
        description="The http or https URL to call. Its host must have a public address.",
        examples=["https://shop.example/hooks/comfyfleet"],
    )
    events: list[WebhookEvent] = Field(
        default=list(WebhookEvent),
        min_length=1,
        max_length=10,
        description="The events to send. The default is all events.",
    )


@webhooks_router.post("/webhooks", status_code=status.HTTP_201_CREATED, name="create")
async def create_webhook(
    body: NewWebhook, plane: PlaneDep, now: NowDep, caller: Writer
) -> MadeWebhook:
    """Creates a webhook, which is called whenever one of your jobs finishes. The URL's address must
    be public, unless the operator allows its host and port."""
    listed = plane.outward.private_hosts
    target = parse_webhook_url(body.url, listed)
    async with plane.pools[caller.tenant.pool].read() as tx:
        # Checks the limit first, because resolving the host may take seconds.
        await webhooks.require_room(tx, caller.tenant.id, caller.user_id)
    await plane.outward.refuse_private(target, listed, who=caller.tenant.id)
    async with plane.pools[caller.tenant.pool].transaction() as tx:
        webhook = await webhooks.create_webhook(
            tx,
            webhook_id=plane.context.new_id(),
            tenant_id=caller.tenant.id,
            user_id=caller.user_id,
            url=body.url,
            events=body.events,
            private_hosts=listed,
            now=now,
        )
    return MadeWebhook(
        **_webhook_answer(webhook).model_dump(), secret=webhook.secret_with(plane.webhook_key)
    )


@webhooks_router.get("/webhooks")
async def list_webhooks(plane: PlaneDep, caller: Reader) -> Webhooks:
    async with plane.pools[caller.tenant.pool].read() as tx:
        registered = await webhooks.list_webhooks(tx, caller.tenant.id, caller.user_id)
    return Webhooks(webhooks=tuple(map(_webhook_answer, registered)))


@webhooks_router.post("/webhooks/{webhook_id}/activate", responses=problems(404))
async def activate(webhook_id: UUID, plane: PlaneDep, now: NowDep, caller: Writer) -> WebhookAnswer:
    """Enables a webhook that was disabled after days of failed deliveries. It is called for jobs
    that finish from now on. Missed deliveries are listed in its log."""
    async with plane.pools[caller.tenant.pool].transaction() as tx:
        webhook, was_off = await webhooks.enable(
            tx, caller.tenant.id, caller.user_id, webhook_id, now=now
        )
    if was_off:
        async with plane.central.transaction() as tx:
            await record_audit(
                tx,
                caller.tenant.subject,
                "switch_on",
                f"webhook:{webhook.id}",
                now,
                caller.tenant.id,
            )
    return _webhook_answer(webhook)


@webhooks_router.post("/webhooks/{webhook_id}/test", responses=problems(404, 429))
async def send_test(
    webhook_id: UUID, request: Request, plane: PlaneDep, now: NowDep, caller: Writer
) -> WebhookTest:
    """Sends a signed `test` event immediately and returns the result. This also works for a
    disabled webhook. The event isn't retried or logged."""
    async with plane.pools[caller.tenant.pool].read() as tx:
        webhook = await webhooks.get_webhook(tx, caller.tenant.id, caller.user_id, webhook_id)
    testing: set[UUID] = request.app.state.webhook_tests
    if caller.user_id in testing:
        raise TooManyCalls(
            "your previous test event is still being sent",
            retry_after_seconds=webhooks.TEST_SECONDS,
        )
    testing.add(caller.user_id)
    try:
        answer = await webhooks.send_test(
            plane.outward,
            webhook,
            key=plane.webhook_key,
            test_id=plane.context.new_id(),
            now=now,
        )
    finally:
        testing.discard(caller.user_id)
    return WebhookTest(is_delivered=answer.is_success, status=answer.status, error=answer.error)


@webhooks_router.post("/webhooks/{webhook_id}/secret", responses=problems(404))
async def show_secret(
    webhook_id: UUID, plane: PlaneDep, now: NowDep, caller: KeyHolder
) -> MadeWebhook:
    """Returns the secret that signs the webhook's deliveries. The secret changes only if the
    operator replaces the key from which secrets are derived.

    Requires the `keys` and `write` scopes, because the secret stays valid after the caller's key is
    revoked.
    """
    caller.require(Scope.WRITE)
    async with plane.pools[caller.tenant.pool].read() as tx:
        webhook = await webhooks.get_webhook(tx, caller.tenant.id, caller.user_id, webhook_id)
    async with plane.central.transaction() as tx:
        await _audit(tx, caller, "show_webhook_secret", f"webhook:{webhook.id}", now)
    return MadeWebhook(
        **_webhook_answer(webhook).model_dump(), secret=webhook.secret_with(plane.webhook_key)
    )


@webhooks_router.delete(
    "/webhooks/{webhook_id}", status_code=status.HTTP_204_NO_CONTENT, responses=problems(404)
)
async def remove(webhook_id: UUID, plane: PlaneDep, caller: Writer) -> None:
    """Deletes a webhook, its log and its pending deliveries."""
    async with plane.pools[caller.tenant.pool].transaction() as tx:
        await webhooks.delete_webhook(tx, caller.tenant.id, caller.user_id, webhook_id)


@webhooks_router.get("/webhooks/{webhook_id}/deliveries", responses=problems(404))
async def deliveries(
    webhook_id: UUID,
    plane: PlaneDep,
    caller: Reader,
    before: UUID | None = None,
    limit: Limit = PAGE_USUAL,
) -> Deliveries:
    """Lists a webhook's deliveries with their payload, number of attempts and last response."""
    async with plane.pools[caller.tenant.pool].read() as tx:
        webhook = await webhooks.get_webhook(tx, caller.tenant.id, caller.user_id, webhook_id)
        logged = await webhooks.list_deliveries(tx, webhook, before_id=before, limit=limit + 1)
    page = logged[:limit]
    return Deliveries(
        deliveries=tuple(map(_delivery, page)),
        next=page[-1].id if len(logged) > limit else None,
    )


@webhooks_router.post(
    "/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver", responses=problems(404, 409)
)
async def redeliver(
    webhook_id: UUID, delivery_id: UUID, plane: PlaneDep, now: NowDep, caller: Writer
) -> DeliveryAnswer:
    """Sends a delivery again with the same id, within a few seconds."""
    async with plane.pools[caller.tenant.pool].transaction() as tx:
        webhook = await webhooks.get_webhook(tx, caller.tenant.id, caller.user_id, webhook_id)
        return _delivery(await webhooks.redeliver(tx, webhook, delivery_id, now=now))


account_router = public_router("account")


@account_router.get("/account")
async def show_account(plane: PlaneDep, caller: Reader) -> AccountAnswer:
    """Returns the key's user and tenant, the balance and the limits."""
    tenant, user_id = caller.tenant, caller.user_id
    async with plane.pools[tenant.pool].read() as tx:
        user = await tenants.get_user(tx, tenant.id, user_id)
        balance = await ledger.balance(tx, tenant.id, user_id)
        active = await jobs.count_active(tx, tenant.id, user_id)
        used = await media.used_bytes(tx, tenant.id)
    return AccountAnswer(
        user=AccountUser(id=user.id, name=user.name, email=user.email),
        tenant=AccountTenant(id=tenant.id, name=tenant.name),
        key=_key_answer(caller.key),
        limits=AccountLimits(
            max_active_jobs=plane.settings.max_active_jobs_per_user,
            active_jobs=active,
            max_upload_bytes=plane.settings.max_upload_bytes,
            max_storage_bytes=ingest.quota_of(plane, caller),
            used_storage_bytes=used,
        ),
        balance=balance,
        top_up_url=top_up_url(plane, caller),
    )


FOUND_MAX = 10


@account_router.get("/search")
async def search(
    plane: PlaneDep,
    caller: Reader,
    q: Annotated[
        Text, Query(max_length=100, description="Part of a name, or the start of an id.")
    ] = "",
    limit: Annotated[
        int, Query(ge=1, le=FOUND_MAX, description="Maximum number of results of each kind.")
    ] = 5,
) -> SearchAnswer:
    """Finds effects and your own media and jobs, by part of a name or by at least the first 6
    digits of an id."""
    text = q.strip()
    if not text:
        return SearchAnswer()
    tenant_id, user_id = caller.tenant.id, caller.user_id
    async with plane.central.read() as tx:
        offers = await catalog.list_published(tx, limit=limit, text=text)
    effect_ids = [offer.effect.id for offer in offers]
    async with plane.pools[caller.tenant.pool].read() as tx:
        items = await media.search(tx, tenant_id, user_id, text, limit=limit)
        job_rows = await jobs.search(
            tx, tenant_id, user_id, text, effect_ids=effect_ids, limit=limit
        )
    return SearchAnswer(
        media=tuple(
            FoundMedia(id=item.id, kind=item.kind, filename=name, created_at=item.created_at)
            for item, name in items
        ),
        effects=tuple(
            FoundEffect(
                id=offer.effect.id, slug=offer.effect.slug, title=offer.effect.settings.title
            )
            for offer in offers
        ),
        jobs=tuple(
            FoundJob(
                id=job.id,
                status=job.shown_status,
                effect_id=job.effect_id,
                video_id=job.video_id,
                submitted_at=job.submitted_at,
            )
            for job in job_rows
        ),
    )


def _webhook_answer(webhook: RegisteredWebhook) -> WebhookAnswer:
    return WebhookAnswer(
        id=webhook.id,
        url=webhook.url,
        events=tuple(sorted(webhook.events)),
        is_active=webhook.is_active,
        created_at=webhook.created_at,
    )


def _delivery(delivery: WebhookDelivery) -> DeliveryAnswer:
    is_pending = delivery.status == DeliveryStatus.PENDING
    return DeliveryAnswer(
        id=delivery.id,
        job_id=delivery.job_id,
        event=delivery.event,
        status=delivery.status,
        tries=delivery.tries,
        last_status=delivery.last_status,
        last_error=delivery.last_error,
        next_try_at=delivery.not_before if is_pending else None,
        payload=dict(delivery.payload),
        created_at=delivery.created_at,
        ended_at=delivery.ended_at,
    )
