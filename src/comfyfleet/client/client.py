"""The API of a control plane, for Python: upload, apply an effect, wait, take the results."""

from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import httpx

from comfyfleet.client.answers import parsed
from comfyfleet.client.batches import BatchHandle
from comfyfleet.client.calls import Call, Calls
from comfyfleet.client.following import job_of
from comfyfleet.client.graphs import Graphs
from comfyfleet.client.jobs import JobHandle
from comfyfleet.client.model import (
    Announced,
    Batch,
    Effect,
    Effects,
    Job,
    JobPage,
    Key,
    Keys,
    Media,
    MediaPage,
    Transaction,
    TransactionPage,
    Wallet,
)
from comfyfleet.client.paging import PAGE, pages
from comfyfleet.client.patience import Patience
from comfyfleet.client.pipelines import Pipelines
from comfyfleet.client.uploading import Transferred, put, source_of
from comfyfleet.client.webhooks import Webhooks
from comfyfleet.kernel.errors import InvalidInput, NotFound

# The control plane fetches a file before it answers.
FETCH_SECONDS = 330.0


class Client:
    """One user's view of one control plane. Use it as `async with Client(url, key) as client:`.

    Every call raises errors of `comfyfleet.kernel.errors` with the API's code and details. Connection
    trouble, 429 and 503 are waited out; nothing is ever submitted twice.
    """

    def __init__(
        self,
        base_url: str,
        key: str,
        *,
        patience: Patience | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise InvalidInput(f"the base URL must be http or https, not {base_url!r}")
        self._calls = Calls(base_url, key, patience=patience or Patience(), transport=transport)
        self._effect_ids: dict[str, UUID] = {}
        self.webhooks = Webhooks(self._calls)
        self.graphs = Graphs(self._calls)
        self.pipelines = Pipelines(self._calls)

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
        await self._calls.client.aclose()

    # What there is

    async def effects(self) -> list[Effect]:
        """All that are published, by slug."""
        found: list[Effect] = []
        query = {"limit": PAGE}
        async for page in pages(self._calls, "/api/effects", Effects, query, by="after"):
            found += page.effects
        self._effect_ids.update({each.slug: each.id for each in found})
        return found

    async def effect(self, slug: str) -> Effect:
        found = next((each for each in await self.effects() if each.slug == slug), None)
        if found is None:
            raise NotFound(f"there is no effect {slug}")
        return found

    async def wallet(self) -> Wallet:
        return parsed(Wallet, await self._calls.ask(Call("GET", "/api/wallet")))

    async def transactions(self, *, page_size: int = PAGE) -> AsyncIterator[Transaction]:
        """All of them, the newest first."""
        path, query = "/api/wallet/transactions", {"limit": page_size}
        async for page in pages(self._calls, path, TransactionPage, query):
            for each in page.transactions:
                yield each

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
        """A file by its path, bytes with a `filename`, or a URL that the control plane fetches.

        With `effect`, what it would not take is refused before the first byte is sent.
        """
        if isinstance(source, str) and urlsplit(source).scheme in ("http", "https"):
            call = Call("POST", "/api/videos", {"url": source}, answer_seconds=FETCH_SECONDS)
            return parsed(Media, await self._calls.ask(call))
        file = source_of(source, filename=filename, content_type=content_type)
        body: dict[str, Any] = {
            "filename": file.filename,
            "content_type": file.content_type,
            "size": file.size,
        }
        if effect is not None:
            body["effect_id"] = str(await self._effect_id(effect))
        # Announced twice, one of them stays without content and is swept away.
        call = Call("POST", "/api/videos/uploads", body, is_repeatable=True)
        announced = parsed(Announced, await self._calls.ask(call))
        await put(self._calls, announced.upload, file, progress)
        # A file has one media item, however often it is linked.
        body = {"file_id": str(announced.file_id)}
        call = Call("POST", "/api/videos", body, is_repeatable=True)
        return parsed(Media, await self._calls.ask(call))

    async def media(self, media_id: UUID | str) -> Media:
        return parsed(Media, await self._calls.ask(Call("GET", f"/api/videos/{media_id}")))

    async def all_media(self, *, page_size: int = PAGE) -> AsyncIterator[Media]:
        """The newest first, without URLs: ask for one of them to get those."""
        async for page in pages(self._calls, "/api/videos", MediaPage, {"limit": page_size}):
            for each in page.videos:
                yield each

    # Jobs

    async def apply(
        self,
        effect: Effect | UUID | str,
        media: Media | UUID | str | None = None,
        properties: Mapping[str, Any] | None = None,
        *,
        idempotency_key: str | None = None,
    ) -> JobHandle:
        """A job, submitted once: repeats after trouble carry the same key, made here if none is given.

        An effect is named by its slug or id. Raises InsufficientTokens, and Conflict for a key that
        was used for something else.
        """
        key = idempotency_key or str(uuid4())
        body: dict[str, Any] = {
            "effect_id": str(await self._effect_id(effect)),
            "properties": dict(properties or {}),
            "idempotency_key": key,
        }
        if media is not None:
            body["video_id"] = _id(media)
        answer = await self._calls.ask(Call("POST", "/api/ai-jobs", body, is_repeatable=True))
        return JobHandle(self._calls, parsed(Job, answer), idempotency_key=key)

    async def apply_many(
        self,
        effect: Effect | UUID | str,
        sets: Iterable[Mapping[str, Any]],
        *,
        media: Iterable[Media | UUID | str] | None = None,
        idempotency_key: str | None = None,
    ) -> BatchHandle:
        """Up to 1,000 sets of properties under one id; a few of them run at a time.

        Where the effect takes media, one for each set. All are accepted, or none.
        """
        items: list[dict[str, Any]] = [{"properties": dict(each)} for each in sets]
        if media is not None:
            for item, each in zip(items, media, strict=True):
                item["video_id"] = _id(each)
        body = {
            "effect_id": str(await self._effect_id(effect)),
            "items": items,
            "idempotency_key": idempotency_key or str(uuid4()),
        }
        call = Call("POST", "/api/ai-jobs/batches", body, is_repeatable=True)
        return BatchHandle(self._calls, parsed(Batch, await self._calls.ask(call)))

    async def job(self, job_id: UUID | str) -> JobHandle:
        return JobHandle(self._calls, await job_of(self._calls, UUID(str(job_id))))

    async def jobs(
        self, *, status: str | None = None, page_size: int = PAGE
    ) -> AsyncIterator[JobHandle]:
        """All of this user's, the newest first."""
        query = {"status": status, "limit": page_size}
        async for page in pages(self._calls, "/api/ai-jobs", JobPage, query):
            for each in page.jobs:
                yield JobHandle(self._calls, each)

    async def batch(self, batch_id: UUID | str) -> BatchHandle:
        call = Call("GET", f"/api/ai-jobs/batches/{batch_id}")
        return BatchHandle(self._calls, parsed(Batch, await self._calls.ask(call)))

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
        return list(parsed(Keys, await self._calls.ask(Call("GET", "/api/keys"))).keys)

    async def create_key(
        self,
        name: str,
        *,
        scopes: Collection[str] | None = None,
        expires_at: datetime | None = None,
    ) -> Key:
        """Its `key` is shown this once."""
        body: dict[str, Any] = {"name": name}
        if scopes is not None:
            body["scopes"] = sorted(scopes)
        if expires_at is not None:
            body["expires_at"] = expires_at.isoformat()
        return parsed(Key, await self._calls.ask(Call("POST", "/api/keys", body)))

    async def revoke_key(self, key: Key | UUID | str) -> None:
        await self._calls.ask(Call("DELETE", f"/api/keys/{_id(key)}"))


def _id(given: Media | Key | UUID | str) -> str:
    return str(given.id if isinstance(given, Media | Key) else given)
