"""A webhook, and what was or is to be delivered to it."""

import hashlib
import hmac
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from comfyfleet.fetching.targets import target_of
from comfyfleet.kernel.errors import InvalidInput

SECRET_BEGINS = "whsec_"  # noqa: S105 - only what each of them begins with
WEBHOOKS_PER_USER_MAX = 20


class WebhookEvent(StrEnum):
    COMPLETED = "job.completed"
    FAILED = "job.failed"
    CANCELLED = "job.cancelled"
    PIPELINE_ALERT = "pipeline.alert"  # too many jobs of a run have failed
    PIPELINE_PAUSED = "pipeline.paused"  # its files fill the room that they have


class DeliveryStatus(StrEnum):
    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Webhook:
    id: UUID
    tenant_id: UUID
    user_id: UUID
    url: str
    secret: str  # of those that were made while secrets were stored; else empty
    events: frozenset[WebhookEvent]
    is_active: bool
    created_at: datetime
    on_again_at: datetime | None = None  # when it was last switched on after it had been off

    def secret_with(self, key: str) -> str:
        """What its deliveries are signed with: made from the installation's key, and so not stored."""
        if self.secret:
            return self.secret
        return SECRET_BEGINS + hmac.new(key.encode(), self.id.bytes, hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Delivery:
    id: UUID
    tenant_id: UUID
    webhook_id: UUID
    job_id: UUID
    event: WebhookEvent
    payload: Mapping[str, Any]
    status: DeliveryStatus
    tries: int
    not_before: datetime
    last_status: int | None
    last_error: str | None
    created_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What the customer's server made of it; `error` where none came."""

    status: int | None = None
    error: str | None = None

    @property
    def is_taken(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


def check_url(url: str) -> str:
    """Whether its address is public is asked at each delivery: that may change at any time."""
    return target_of(url).url


def check_events(events: Collection[str]) -> frozenset[WebhookEvent]:
    known = {str(each) for each in WebhookEvent}
    unknown = sorted(set(events) - known)
    if unknown or not events:
        raise InvalidInput(
            f"events must be some of {', '.join(WebhookEvent)}", field="events", unknown=unknown
        )
    return frozenset(WebhookEvent(each) for each in events)
