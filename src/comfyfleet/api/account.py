"""Keys, wallet and webhooks of a user in the public API."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any
from uuid import UUID

from pydantic import Field

from comfyfleet.api.values import OPEN_ENUM, Page, Response


class Scope(StrEnum):
    READ = "read"  # effects, media, jobs, wallet
    WRITE = "write"  # upload, submit, cancel, retry
    KEYS = "keys"  # make and revoke keys


class KeyAnswer(Response):
    id: UUID
    name: str
    prefix: str = Field(description="Its first characters.", examples=["cf_1a2b3c4d"])
    scopes: tuple[Annotated[Scope, OPEN_ENUM], ...]
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = Field(default=None, description="To the minute.")


class MadeKey(KeyAnswer):
    key: str = Field(description="Shown only once: only its hash is stored.")


class PublicKeys(Response):
    keys: tuple[KeyAnswer, ...] = Field(description="The newest first, including revoked ones.")


class WalletAnswer(Response):
    """The balance of a wallet."""

    balance: int = Field(description="Tokens that are not reserved.", examples=[95])


class WalletSummaryAnswer(WalletAnswer):
    """The balance, what is held for jobs, and what came and went lately."""

    reserved_tokens: int = Field(default=0, description="Held for jobs that have not ended.")
    days: int = Field(default=30, description="To which the sums below belong.")
    added_tokens: int = 0
    spent_tokens: int = Field(default=0, description="By jobs that completed.")
    refunded_tokens: int = Field(default=0, description="By jobs that did not.")
    top_up_url: str | None = Field(
        default=None, description="Where tokens are bought, if the operator has named a place."
    )


class TransactionType(StrEnum):
    PAYMENT_CREDIT = "PAYMENT_CREDIT"
    JOB_RESERVE = "JOB_RESERVE"
    JOB_CONSUME = "JOB_CONSUME"
    JOB_REFUND = "JOB_REFUND"


class TransactionAnswer(Response):
    """One entry of the ledger."""

    id: int
    type: TransactionType
    amount: int = Field(description="What it added to the balance.", examples=[-5])
    job_id: UUID | None = None
    provider_transaction_id: str | None = Field(default=None, description="Of a payment.")
    effect_id: UUID | None = Field(default=None, description="That its job applied.")
    video_id: UUID | None = Field(default=None, description="The media of its job.")
    created_at: datetime


class Transactions(Page):
    transactions: tuple[TransactionAnswer, ...] = Field(description="The newest first.")
    next: int | None = Field(default=None, description="The next page: before=next; null: no more.")


class WebhookEvent(StrEnum):
    COMPLETED = "job.completed"
    FAILED = "job.failed"
    CANCELLED = "job.cancelled"
    PIPELINE_ALERT = "pipeline.alert"  # too many jobs of a run have failed
    PIPELINE_PAUSED = "pipeline.paused"  # its files fill the room that they have
    GRAPH_RUN_ENDED = "graph_run.ended"  # completed or cancelled
    GRAPH_RUN_FAILED = "graph_run.failed"
    GRAPH_RUN_ASKS = "graph_run.asks"  # a node waits for a person's answer


class WebhookAnswer(Response):
    id: UUID
    url: str
    events: tuple[Annotated[WebhookEvent, OPEN_ENUM], ...]
    is_active: bool = Field(
        default=True,
        description="false: switched off after days of failed deliveries; switch it on with …/activate.",
    )
    created_at: datetime


class WebhookTest(Response):
    """How a receiver responded to a test message."""

    is_delivered: bool = Field(description="Whether the response had a status from 200 to 299.")
    status: int | None = Field(default=None, description="Of the response; null: there was none.")
    error: str | None = Field(default=None, description="Why there was no response.")


class MadeWebhook(WebhookAnswer):
    secret: str = Field(
        description="Shown here and by …/secret only. Every delivery is signed with it (HMAC-SHA256).",
        examples=["whsec_5f…"],
    )


class Webhooks(Response):
    webhooks: tuple[WebhookAnswer, ...]


class DeliveryStatus(StrEnum):
    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


class DeliveryAnswer(Response):
    """One delivery of an event to a webhook, with its attempts."""

    id: UUID
    job_id: UUID
    event: Annotated[WebhookEvent, OPEN_ENUM]
    status: DeliveryStatus
    tries: int
    last_status: int | None = Field(
        default=None, description="The server's last response.", examples=[200]
    )
    last_error: str | None = Field(default=None, description="Why there was no response.")
    next_try_at: datetime | None = Field(default=None, description="null: it has ended.")
    payload: dict[str, Any] = Field(default_factory=dict)
    created_at: datetime
    ended_at: datetime | None = None


class Deliveries(Page):
    deliveries: tuple[DeliveryAnswer, ...] = Field(description="The newest first.")
    next: UUID | None = Field(
        default=None, description="The next page: before=next; null: no more."
    )


class AccountUser(Response):
    id: UUID
    name: str | None = None
    email: str | None = None


class AccountTenant(Response):
    id: UUID
    name: str


class AccountLimits(Response):
    """What the user may do at once, and how much of it is taken."""

    max_active_jobs: int = Field(description="Queued and running, of all kinds.", examples=[5])
    active_jobs: int
    max_upload_bytes: int
    max_storage_bytes: int = Field(description="Of the whole tenant, announced uploads included.")
    used_storage_bytes: int


class AccountAnswer(Response):
    """Whose key this is, what it may do, and what there is."""

    user: AccountUser
    tenant: AccountTenant
    key: KeyAnswer
    limits: AccountLimits
    balance: int = Field(description="Tokens that are not reserved.")
    top_up_url: str | None = Field(
        default=None, description="Where tokens are bought, if the operator has named a place."
    )


class FoundMedia(Response):
    id: UUID
    kind: str
    filename: str | None = Field(default=None, description="null: it has expired.")
    created_at: datetime


class FoundEffect(Response):
    id: UUID
    slug: str
    title: str


class FoundJob(Response):
    id: UUID
    status: str
    effect_id: UUID | None = None
    video_id: UUID | None = None
    submitted_at: datetime


class SearchAnswer(Response):
    """The best few of each kind, the newest first."""

    media: tuple[FoundMedia, ...] = ()
    effects: tuple[FoundEffect, ...] = ()
    jobs: tuple[FoundJob, ...] = ()
