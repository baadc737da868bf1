"""Webhooks of a user, and how to know that a message is really one of them."""

import time
from collections.abc import Collection
from typing import Any
from uuid import UUID

from comfyfleet.client.answers import parsed
from comfyfleet.client.calls import Call, Calls
from comfyfleet.client.model import Deliveries, Delivery, Webhook, WebhookList
from comfyfleet.wire.signatures import HEADER, TOLERANCE_SECONDS, is_signed

SIGNATURE_HEADER = HEADER


class Webhooks:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def create(self, url: str, *, events: Collection[str] | None = None) -> Webhook:
        """With its `secret`, which lists leave out."""
        body: dict[str, Any] = {"url": url}
        if events is not None:
            body["events"] = sorted(events)
        return parsed(Webhook, await self._calls.ask(Call("POST", "/api/webhooks", body)))

    async def all(self) -> list[Webhook]:
        return list(
            parsed(WebhookList, await self._calls.ask(Call("GET", "/api/webhooks"))).webhooks
        )

    async def activate(self, webhook: Webhook | UUID | str) -> Webhook:
        """On again, after it was switched off because nobody took anything there for days."""
        call = Call("POST", f"/api/webhooks/{_id(webhook)}/activate")
        return parsed(Webhook, await self._calls.ask(call))

    async def with_secret(self, webhook: Webhook | UUID | str) -> Webhook:
        """With its `secret`, for instance after the operator has replaced the key for all of them."""
        call = Call("POST", f"/api/webhooks/{_id(webhook)}/secret")
        return parsed(Webhook, await self._calls.ask(call))

    async def remove(self, webhook: Webhook | UUID | str) -> None:
        await self._calls.ask(Call("DELETE", f"/api/webhooks/{_id(webhook)}"))

    async def deliveries(self, webhook: Webhook | UUID | str) -> list[Delivery]:
        """The newest ones, as far as one page goes."""
        call = Call("GET", f"/api/webhooks/{_id(webhook)}/deliveries")
        return list(parsed(Deliveries, await self._calls.ask(call)).deliveries)


def verify_signature(
    secret: str,
    body: bytes,
    header: str,
    *,
    now: float | None = None,
    tolerance_seconds: int = TOLERANCE_SECONDS,
) -> bool:
    """Whether `body`, as it came and before anything parsed it, was signed by us, and lately.

    `header` is the value of `X-Comfyfleet-Signature`.
    """
    at = int(time.time() if now is None else now)
    return is_signed(secret, body, header, now=at, tolerance_seconds=tolerance_seconds)


def _id(webhook: Webhook | UUID | str) -> str:
    return str(webhook.id if isinstance(webhook, Webhook) else webhook)
