"""The client for comfyfleet's API: jobs, media, effects, graphs, pipelines, triggers and
webhooks."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Mapping
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit
from uuid import UUID, uuid4

import httpx

from comfyfleet.api.account import (
    AccountAnswer,
    Deliveries,
    PublicKeys,
    SearchAnswer,
    Transactions,
    WalletSummaryAnswer,
    Webhooks,
    WebhookTest,
)
from comfyfleet.api.graphs import Firings, Triggers
from comfyfleet.api.jobs import FollowedJob, FollowedJobs, Jobs, PublicEffects
from comfyfleet.api.media import MadeShare, ShareAnswer, SharedAnswer, Shares, Videos
from comfyfleet.api.webhooks import HEADER, TOLERANCE_SECONDS, is_signature_valid
from comfyfleet.client.admin import AdminApi
from comfyfleet.client.files import IN_PARTS_BYTES, upload_in_parts, upload_source, upload_to
from comfyfleet.client.graphs import GraphsApi
from comfyfleet.client.jobs import BatchHandle, FollowedJobEvents, JobHandle, fetch_job
from comfyfleet.client.model import (
    Batch,
    Delivery,
    Effect,
    Firing,
    Job,
    Key,
    Media,
    Transaction,
    Trigger,
    Wallet,
    Webhook,
)
from comfyfleet.client.pipelines import PipelinesApi
from comfyfleet.client.transport import PAGE, ApiCalls, fetch_pages, parse_answer
from comfyfleet.errors import InvalidInput
from comfyfleet.transport.files import Transferred
from comfyfleet.transport.http import Call
from comfyfleet.transport.retry import RetryPolicy

SIGNATURE_HEADER = HEADER


class WebhooksApi:
    def __init__(self, calls: ApiCalls) -> None:
        self._calls = calls

    async def create(self, url: str, *, events: Collection[str] | None = None) -> Webhook:
        """Creates a webhook and returns it with its `secret`, which lists leave out."""
        body: dict[str, Any] = {"url": url}
        if events is not None:
            body["events"] = sorted(events)
        return parse_answer(Webhook, await self._calls.ask(Call("POST", "/api/webhooks", body)))

    async def all(self) -> list[Webhook]:
        answer = await self._calls.ask(Call("GET", "/api/webhooks"))
        return [Webhook(**dict(webhook)) for webhook in parse_answer(Webhooks, answer).webhooks]

    async def activate(self, webhook: Webhook | UUID | str) -> Webhook:
        """Reactivates a webhook that was disabled because its deliveries had failed for days."""
        call = Call("POST", f"/api/webhooks/{_webhook_id(webhook)}/activate")
        return parse_answer(Webhook, await self._calls.ask(call))

    async def test(self, webhook: Webhook | UUID | str) -> WebhookTest:
        """Sends a signed test message immediately, and returns the receiver's response."""
        call = Call("POST", f"/api/webhooks/{_webhook_id(webhook)}/test")
        return parse_answer(WebhookTest, await self._calls.ask(call))

    async def with_secret(self, webhook: Webhook | UUID | str) -> Webhook:
        """Returns a webhook with its `secret`, for example after the operator has replaced the key
        for all secrets."""
        call = Call("POST", f"/api/webhooks/{_webhook_id(webhook)}/secret")
        return parse_answer(Webhook, await self._calls.ask(call))

    async def remove(self, webhook: Webhook | UUID | str) -> None:
        await self._calls.ask(Call("DELETE", f"/api/webhooks/{_webhook_id(webhook)}"))

    async def redeliver(
        self, webhook: Webhook | UUID | str, delivery: Delivery | UUID | str
    ) -> Delivery:
        """Sends a delivery again, with its original id."""
        delivery_id = delivery.id if isinstance(delivery, Delivery) else delivery
        path = f"/api/webhooks/{_webhook_id(webhook)}/deliveries/{delivery_id}/redeliver"
        return parse_answer(Delivery, await self._calls.ask(Call("POST", path)))

    async def deliveries(self, webhook: Webhook | UUID | str) -> list[Delivery]:
        """Returns the newest deliveries, at most one page."""
        call = Call("GET", f"/api/webhooks/{_webhook_id(webhook)}/deliveries")
        return list(parse_answer(Deliveries, await self._calls.ask(call)).deliveries)


class TriggersApi:
    """Schedules and incoming webhooks that start runs. Graphs and pipelines can be given by id or
    name."""

    def __init__(self, calls: ApiCalls) -> None:
        self._calls = calls

    async def create(
        self,
        name: str,
        *,
        tokens_per_day: int,
        graph: UUID | str | None = None,
        pipeline: UUID | str | None = None,
        inputs: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Trigger:
        """Creates a schedule if `cron` is given, otherwise a webhook, whose `secret` is only
        returned here.

        Other fields: `version`, `base_candidates`, `timezone`, `catch_up`, `max_tokens`."""
        body = {
            "name": name,
            "tokens_per_day": tokens_per_day,
            "graph": str(graph) if graph else None,
            "pipeline": str(pipeline) if pipeline else None,
            "inputs": dict(inputs or {}),
            **fields,
        }
        return parse_answer(Trigger, await self._calls.ask(Call("POST", "/api/triggers", body)))

    async def all(self, *, page_size: int = PAGE) -> AsyncIterator[Trigger]:
        """Yields the user's triggers, newest first."""
        query = {"limit": page_size}
        async for page in fetch_pages(self._calls, "/api/triggers", Triggers, query):
            for trigger in page.triggers:
                yield Trigger(**dict(trigger))

    async def get(self, trigger: Trigger | UUID | str) -> Trigger:
        return parse_answer(Trigger, await self._calls.ask(Call("GET", _trigger_path(trigger))))

    async def pause(self, trigger: Trigger | UUID | str) -> Trigger:
        return await self._act(trigger, "pause")

    async def resume(self, trigger: Trigger | UUID | str) -> Trigger:
        """Resumes a trigger. A schedule continues with its next scheduled time."""
        return await self._act(trigger, "resume")

    async def renew_secret(self, trigger: Trigger | UUID | str) -> Trigger:
        """Replaces the `secret` and returns the trigger with the new one. The old one becomes
        invalid."""
        call = Call("POST", f"{_trigger_path(trigger)}/secret")
        return parse_answer(Trigger, await self._calls.ask(call))

    async def _act(self, trigger: Trigger | UUID | str, act: str) -> Trigger:
        call = Call("POST", f"{_trigger_path(trigger)}/{act}", is_repeatable=True)
        return parse_answer(Trigger, await self._calls.ask(call))

    async def fire(
        self,
        trigger: Trigger | UUID | str,
        *,
        body: Any = None,
        idempotency_key: str | None = None,
    ) -> Firing:
        """Fires a trigger now, exactly once. Retries use the same key, which is generated if none
        is given."""
        fields = {"body": body, "idempotency_key": idempotency_key or str(uuid4())}
        call = Call("POST", f"{_trigger_path(trigger)}/fire", fields, is_repeatable=True)
        return parse_answer(Firing, await self._calls.ask(call))

    async def firings(
        self, trigger: Trigger | UUID | str, *, page_size: int = PAGE
    ) -> AsyncIterator[Firing]:
        """Yields firings, newest first: runs, refusals and missed times."""
        path, query = f"{_trigger_path(trigger)}/firings", {"limit": page_size}
        async for page in fetch_pages(self._calls, path, Firings, query):
            for firing in page.firings:
                yield firing

    async def delete(self, trigger: Trigger | UUID | str) -> None:
        """Deletes a trigger. Its runs remain."""
        await self._calls.ask(Call("DELETE", _trigger_path(trigger)))


def _trigger_path(trigger: Trigger | UUID | str) -> str:
    return f"/api/triggers/{trigger.id if isinstance(trigger, Trigger) else trigger}"


def verify_signature(
    secret: str,
    body: bytes,
    header: str,
    *,
    now: float | None = None,
    tolerance_seconds: int = TOLERANCE_SECONDS,
) -> bool:
    """Checks whether `body` was signed by the control plane recently. Pass the raw body, before any
    parsing.

    `header` is the value of `X-Comfyfleet-Signature`."""
    at = int(time.time() if now is None else now)
    return is_signature_valid(secret, body, header, now=at, tolerance_seconds=tolerance_seconds)


def _webhook_id(webhook: Webhook | UUID | str) -> str:
    return str(webhook.id if isinstance(webhook, Webhook) else webhook)


# Timeout in seconds. It is long because the control plane fetches the file before it responds.
FETCH_SECONDS = 330.0


class Client:
    """One user's access to one control plane. Use it as `async with Client(url, key) as client:`.

    Every call raises errors of `comfyfleet.errors` with the API's code and details. The client
    retries after connection problems, 429 and 503. Nothing is ever submitted twice."""

    def __init__(
        self,
        base_url: str,
        key: str,
        *,
        patience: RetryPolicy | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise InvalidInput(f"the base URL must be http or https, not {base_url!r}")
        self.calls = ApiCalls(base_url, key, retry=patience or RetryPolicy(), transport=transport)
        self._effect_ids: dict[str, UUID] = {}
        self.webhooks = WebhooksApi(self.calls)
        self.graphs = GraphsApi(self.calls)
        self.pipelines = PipelinesApi(self.calls)
        self.triggers = TriggersApi(self.calls)
        self.admin = AdminApi(self.calls)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self.calls.client.aclose()

    # Effects, wallet and account

    async def effects(self, q: str | None = None, *, tag: str | None = None) -> list[Effect]:
        """Returns published effects, ordered by slug. `q` and `tag` filter them."""
        effects: list[Effect] = []
        query = {"limit": PAGE, "q": q, "tag": tag}
        async for page in fetch_pages(self.calls, "/api/effects", PublicEffects, query, by="after"):
            effects += page.effects
        self._effect_ids.update({effect.slug: effect.id for effect in effects})
        return effects

    async def effect(self, slug: str) -> Effect:
        call = Call("GET", f"/api/effects/{quote(slug, safe='')}")
        effect = parse_answer(Effect, await self.calls.ask(call))
        self._effect_ids[effect.slug] = effect.id
        return effect

    async def wallet(self) -> Wallet:
        return parse_answer(Wallet, await self.calls.ask(Call("GET", "/api/wallet")))

    async def wallet_summary(self, *, days: int = 30) -> WalletSummaryAnswer:
        """Returns the balance, the tokens reserved for jobs, and the tokens added, spent and
        refunded."""
        call = Call("GET", "/api/wallet/summary", params={"days": days})
        return parse_answer(WalletSummaryAnswer, await self.calls.ask(call))

    async def account(self) -> AccountAnswer:
        """Returns the key's user, with balance and limits."""
        return parse_answer(AccountAnswer, await self.calls.ask(Call("GET", "/api/account")))

    async def search(self, q: str, *, limit: int = 5) -> SearchAnswer:
        """Finds media, effects and jobs by name or by the first digits of an id."""
        call = Call("GET", "/api/search", params={"q": q, "limit": limit})
        return parse_answer(SearchAnswer, await self.calls.ask(call))

    async def transactions(
        self, *, types: Collection[str] = (), page_size: int = PAGE
    ) -> AsyncIterator[Transaction]:
        """Yields transactions, newest first. `types` filters them."""
        path = "/api/wallet/transactions"
        query = {"limit": page_size, "type": sorted(types) or None}
        async for page in fetch_pages(self.calls, path, Transactions, query):
            for transaction in page.transactions:
                yield transaction

    # Media

    async def upload(
        self,
        source: Path | bytes | str,
        *,
        filename: str | None = None,
        content_type: str | None = None,
        effect: Effect | UUID | str | None = None,
        progress: Transferred | None = None,
    ) -> Media:
        """Uploads a file by path, bytes with a `filename`, or a URL that the control plane fetches.

        With `effect`, a file that the effect doesn't accept is refused before any data is sent."""
        if isinstance(source, str) and urlsplit(source).scheme in ("http", "https"):
            call = Call("POST", "/api/videos", {"url": source}, read_seconds=FETCH_SECONDS)
            return parse_answer(Media, await self.calls.ask(call))
        file = upload_source(source, filename=filename, content_type=content_type)
        fields = {} if effect is None else {"effect_id": str(await self._effect_id(effect))}
        send = upload_in_parts if file.size > IN_PARTS_BYTES else upload_to
        file_id = await send(self.calls, "/api/videos/uploads", file, progress, **fields)
        # A file can have only one media item, so repeating this request creates no second one.
        body = {"file_id": str(file_id)}
        call = Call("POST", "/api/videos", body, is_repeatable=True)
        return parse_answer(Media, await self.calls.ask(call))

    async def media(self, media_id: UUID | str) -> Media:
        return parse_answer(Media, await self.calls.ask(Call("GET", f"/api/videos/{media_id}")))

    async def all_media(self, *, page_size: int = PAGE, **filters: Any) -> AsyncIterator[Media]:
        """Yields media, newest first. `urls=True` adds the URLs of the files. Filters: `kind`,
        `status`, `effect_id`, `q`."""
        query = {"limit": page_size, **filters}
        async for page in fetch_pages(self.calls, "/api/videos", Videos, query):
            for video in page.videos:
                yield Media(**dict(video))

    # Links to results.

    async def share(
        self, media: Media | UUID | str, *, job_id: UUID | str | None = None, **fields: Any
    ) -> MadeShare:
        """Creates a link to the latest result of a media item, or to the result of `job_id`. Its
        `secret` and `url` are shown only once.

        `expires_in` is in seconds. `has_original` shows the input as well."""
        body = {**fields, **({} if job_id is None else {"job_id": str(job_id)})}
        call = Call("POST", f"/api/videos/{_id(media)}/shares", body)
        return parse_answer(MadeShare, await self.calls.ask(call))

    async def shares(self, media: Media | UUID | str | None = None) -> AsyncIterator[ShareAnswer]:
        """Yields links, newest first. `media` limits them to one media item."""
        path = f"/api/videos/{_id(media)}/shares" if media else "/api/shares"
        async for page in fetch_pages(self.calls, path, Shares, {"limit": PAGE}):
            for share in page.shares:
                yield share

    async def revoke_share(self, share: ShareAnswer | UUID | str) -> None:
        share_id = share.id if isinstance(share, ShareAnswer) else share
        await self.calls.ask(Call("DELETE", f"/api/shares/{share_id}"))

    async def shared(self, secret: str) -> SharedAnswer:
        """Returns the content that a link shows. Requires no key."""
        call = Call("GET", "/api/shared", path=f"/api/shared/{quote(secret, safe='')}")
        return parse_answer(SharedAnswer, await self.calls.ask(call))

    # Jobs

    async def apply(
        self,
        effect: Effect | UUID | str,
        media: Media | UUID | str | None = None,
        properties: Mapping[str, Any] | None = None,
        *,
        idempotency_key: str | None = None,
    ) -> JobHandle:
        """Submits a job, exactly once. Retries use the same key, which is generated if none is
        given.

        An effect is given by its slug or id. Raises InsufficientTokens, and Conflict for a key that
        was used for another request."""
        key = idempotency_key or str(uuid4())
        body: dict[str, Any] = {
            "effect_id": str(await self._effect_id(effect)),
            "properties": dict(properties or {}),
            "idempotency_key": key,
        }
        if media is not None:
            body["video_id"] = _id(media)
        answer = await self.calls.ask(Call("POST", "/api/ai-jobs", body, is_repeatable=True))
        return JobHandle(self.calls, parse_answer(Job, answer), idempotency_key=key)

    async def apply_many(
        self,
        effect: Effect | UUID | str,
        sets: Iterable[Mapping[str, Any]],
        *,
        media: Iterable[Media | UUID | str] | None = None,
        idempotency_key: str | None = None,
    ) -> BatchHandle:
        """Submits up to 1,000 sets of properties as one batch. Only a few of the jobs run
        concurrently.

        If the effect requires media, pass one item for each set. Either all jobs are accepted, or
        none."""
        items: list[dict[str, Any]] = [{"properties": dict(properties)} for properties in sets]
        if media is not None:
            for item, media_item in zip(items, media, strict=True):
                item["video_id"] = _id(media_item)
        body = {
            "effect_id": str(await self._effect_id(effect)),
            "items": items,
            "idempotency_key": idempotency_key or str(uuid4()),
        }
        call = Call("POST", "/api/ai-jobs/batches", body, is_repeatable=True)
        return BatchHandle(self.calls, parse_answer(Batch, await self.calls.ask(call)))

    async def job(self, job_id: UUID | str) -> JobHandle:
        return JobHandle(self.calls, await fetch_job(self.calls, UUID(str(job_id))))

    async def jobs(
        self, *, status: str | None = None, page_size: int = PAGE
    ) -> AsyncGenerator[JobHandle, None]:
        """Yields the user's jobs, newest first."""
        query = {"status": status, "limit": page_size}
        async for page in fetch_pages(self.calls, "/api/ai-jobs", Jobs, query):
            for job in page.jobs:
                yield JobHandle(self.calls, Job(**dict(job)))

    async def progress(self, media: Media | UUID | str | None = None) -> list[FollowedJob]:
        """Returns the unfinished jobs in the form shown on web pages. For one media item, its
        latest job is included as well."""
        path = f"/api/videos/{_id(media)}/progress" if media else "/api/account/progress"
        answer = await self.calls.ask(Call("GET", path))
        return list(parse_answer(FollowedJobs, answer).jobs)

    async def follow(
        self, media: Media | UUID | str | None = None
    ) -> AsyncGenerator[FollowedJob, None]:
        """Yields each job whenever it changes, over a single connection. For one media item, ends
        when its jobs have ended. Otherwise, continues without end, and includes jobs that are
        submitted later."""
        path = f"/api/videos/{_id(media)}/events" if media else "/api/account/events"
        async with aclosing(FollowedJobEvents(self.calls, path).follow()) as jobs:
            async for job in jobs:
                yield job

    async def batch(self, batch_id: UUID | str) -> BatchHandle:
        call = Call("GET", f"/api/ai-jobs/batches/{batch_id}")
        return BatchHandle(self.calls, parse_answer(Batch, await self.calls.ask(call)))

    async def _effect_id(self, effect: Effect | UUID | str) -> UUID:
        if isinstance(effect, Effect):
            return effect.id
        if isinstance(effect, UUID):
            return effect
        try:
            return UUID(effect)
        except ValueError:
            return self._effect_ids.get(effect) or (await self.effect(effect)).id

    # Keys

    async def keys(self) -> list[Key]:
        answer = await self.calls.ask(Call("GET", "/api/keys"))
        return [Key(**dict(key)) for key in parse_answer(PublicKeys, answer).keys]

    async def create_key(
        self,
        name: str,
        *,
        scopes: Collection[str] | None = None,
        expires_at: datetime | None = None,
    ) -> Key:
        """Creates a key. The answer contains the `key`, which is shown only once."""
        body: dict[str, Any] = {"name": name}
        if scopes is not None:
            body["scopes"] = sorted(scopes)
        if expires_at is not None:
            body["expires_at"] = expires_at.isoformat()
        return parse_answer(Key, await self.calls.ask(Call("POST", "/api/keys", body)))

    async def revoke_key(self, key: Key | UUID | str) -> None:
        await self.calls.ask(Call("DELETE", f"/api/keys/{_id(key)}"))


def _id(resource: Media | Key | UUID | str) -> str:
    return str(resource.id if isinstance(resource, Media | Key) else resource)
