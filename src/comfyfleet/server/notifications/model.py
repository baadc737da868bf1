"""The model of job events, webhooks with their deliveries and retry times, and audit entries.
Pure."""

import hashlib
import hmac
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, NamedTuple
from uuid import UUID

from comfyfleet.api.account import DeliveryStatus as DeliveryStatus
from comfyfleet.api.account import WebhookEvent as WebhookEvent
from comfyfleet.api.values import is_storable
from comfyfleet.errors import InvalidInput
from comfyfleet.transport.ssrf import HostPort, parse_webhook_url


class EventKind(StrEnum):
    STATUS = "status"
    PROGRESS = "progress"
    OUTPUTS = "outputs"


class NewJobEvent(NamedTuple):
    tenant_id: UUID
    job_id: UUID
    kind: EventKind
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredJobEvent:
    id: int  # increases within a job, so that readers can resume after the last id they received
    tenant_id: UUID
    job_id: UUID
    kind: EventKind
    data: Mapping[str, Any]
    created_at: datetime


SECRET_PREFIX = "whsec_"  # noqa: S105 - only what each of them begins with
WEBHOOKS_PER_USER_MAX = 20


@dataclass(frozen=True, slots=True)
class RegisteredWebhook:
    id: UUID
    tenant_id: UUID
    user_id: UUID
    url: str
    secret: str  # set only for webhooks from releases that stored secrets, otherwise empty
    events: frozenset[WebhookEvent]
    is_active: bool
    created_at: datetime
    on_again_at: datetime | None = None  # when it was last re-enabled

    @property
    def is_for_jobs(self) -> bool:
        """Checks whether the webhook has no address of its own. Such a webhook only signs
        deliveries to addresses given by jobs."""
        return not self.url

    def secret_with(self, key: str) -> str:
        """Returns the secret that signs deliveries. It is derived from the installation's key, so
        it isn't stored."""
        if self.secret:
            return self.secret
        return SECRET_PREFIX + hmac.new(key.encode(), self.id.bytes, hashlib.sha256).hexdigest()


class EndOfJob(NamedTuple):
    """An event for webhooks. `url` is an address given by the job itself."""

    job_id: UUID  # or a substitute id; each webhook gets one delivery per id and event
    event: WebhookEvent
    payload: Mapping[str, Any]
    url: str | None = None

    def is_for(self, webhook: RegisteredWebhook) -> bool:
        return self.url is not None if webhook.is_for_jobs else self.event in webhook.events


@dataclass(frozen=True, slots=True)
class WebhookDelivery:
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
    url: str | None = None  # the target, if it isn't the webhook's own address


@dataclass(frozen=True, slots=True)
class WebhookResponse:
    """The response of the customer's server, or the error if there was no response."""

    status: int | None = None
    error: str | None = None

    @property
    def is_success(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


def check_url(url: str, private_hosts: Collection[HostPort] = ()) -> str:
    """Checks the form of a URL. Each delivery checks whether its address is public, because that
    may change."""
    return parse_webhook_url(url, private_hosts).url


def check_events(events: Collection[str]) -> frozenset[WebhookEvent]:
    known = {str(event) for event in WebhookEvent}
    unknown = sorted(set(events) - known)
    if unknown or not events:
        raise InvalidInput(
            f"events must be one or more of {', '.join(WebhookEvent)}",
            field="events",
            unknown=unknown,
        )
    return frozenset(WebhookEvent(event) for event in events)


# About a day in total, so that a server that is repaired the next morning misses nothing.
RETRY_SECONDS = (10, 30, 120, 600, 1800, 7200, 21_600, 43_200)
TRIES_MAX = len(RETRY_SECONDS) + 1
JITTER = 0.2


def next_attempt_at(tries: int, now: datetime, *, chance: float) -> datetime | None:
    """Returns the time of the next attempt after this many failed ones, or None after the last one.
    `chance` (0 to 1) adds jitter."""
    if tries >= TRIES_MAX:
        return None
    seconds = RETRY_SECONDS[max(tries, 1) - 1]
    return now + timedelta(seconds=seconds * (1 + JITTER * chance))


# Names of fields whose values are left out of the audit log, because its readers must not see any
# secrets.
SECRET_NAMES = ("secret", "password", "authorization", "token", "lease_token", "key", "api_key")
SECRET_ENDINGS = ("_secret", "_password", "_key_hash", "_secret_hash")
LEFT_OUT = "(left out)"
DETAILS_DEPTH_MAX = 8


@dataclass(frozen=True, slots=True)
class AuditEntry:
    id: int
    at: datetime
    actor: str
    action: str
    subject: str
    tenant_id: UUID | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


def without_secrets(details: Any, *, depth: int = DETAILS_DEPTH_MAX) -> Any:
    """Returns details as plain JSON, without the values of keys and secrets at any depth."""
    if depth == 0:
        return LEFT_OUT
    if isinstance(details, Mapping):
        return {
            str(name): LEFT_OUT if is_secret(str(name)) else without_secrets(value, depth=depth - 1)
            for name, value in details.items()
        }
    if isinstance(details, list | tuple | set | frozenset):
        members = sorted(details) if isinstance(details, set | frozenset) else details
        return [without_secrets(member, depth=depth - 1) for member in members]
    if details is None or isinstance(details, bool | int | float):
        return details
    text = str(details)
    return text if is_storable(text) else ascii(text)


def is_secret(name: str) -> bool:
    lowered = name.lower()
    return lowered in SECRET_NAMES or lowered.endswith(SECRET_ENDINGS)
