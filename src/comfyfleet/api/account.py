"""Keys, wallets and webhooks of a user in the public API."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any
from uuid import UUID

from pydantic import Field

from comfyfleet.api.values import OPEN_ENUM, Page, Response


class Scope(StrEnum):
    READ = "read"  # read effects, media, jobs and the wallet
    WRITE = "write"  # upload media; submit, cancel and retry jobs
    KEYS = "keys"  # create and revoke keys


class KeyAnswer(Response):
    id: UUID
    name: str
    prefix: str = Field(description="The first characters of the key.", examples=["cf_1a2b3c4d"])
    scopes: tuple[Annotated[Scope, OPEN_ENUM], ...]
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = Field(default=None, description="Accurate to the minute.")


class MadeKey(KeyAnswer):
    key: str = Field(description="The key, shown only once because only its hash is stored.")


class PublicKeys(Response):
    keys: tuple[KeyAnswer, ...] = Field(description="Newest first, including revoked ones.")


class WalletAnswer(Response):
    """The balance of a wallet."""

    balance: int = Field(description="Tokens that are not reserved.", examples=[95])


class WalletSummaryAnswer(WalletAnswer):
    """The balance, the tokens reserved for jobs, and recent changes."""

    reserved_tokens: int = Field(
        default=0, description="Tokens that are reserved for jobs that have not ended."
    )
    days: int = Field(default=30, description="The number of days that the totals below cover.")
    added_tokens: int = 0
    spent_tokens: int = Field(default=0, description="Tokens spent on completed jobs.")
    refunded_tokens: int = Field(
        default=0, description="Tokens refunded for jobs that did not complete."
    )
    top_up_url: str | None = Field(
        default=None, description="Where to buy tokens, if the operator has configured it."
    )


class TransactionType(StrEnum):
    PAYMENT_CREDIT = "PAYMENT_CREDIT"
    JOB_RESERVE = "JOB_RESERVE"
    JOB_CONSUME = "JOB_CONSUME"
    JOB_REFUND = "JOB_REFUND"


class TransactionAnswer(Response):
    """An entry of the ledger."""

    id: int
    type: TransactionType
    amount: int = Field(description="The change of the balance.", examples=[-5])
    job_id: UUID | None = None
    provider_transaction_id: str | None = Field(default=None, description="The payment's id.")
    effect_id: UUID | None = Field(
        default=None, description="The effect that the transaction's job applied."
    )
    video_id: UUID | None = Field(
        default=None, description="The media item of the transaction's job."
    )
    created_at: datetime


class Transactions(Page):
    transactions: tuple[TransactionAnswer, ...] = Field(description="Newest first.")
    next: int | None = Field(
        default=None,
        description="Pass this as `before` to get the next page. null on the last page.",
    )


class WebhookEvent(StrEnum):
    COMPLETED = "job.completed"
    FAILED = "job.failed"
    CANCELLED = "job.cancelled"
    PIPELINE_ALERT = "pipeline.alert"  # too many jobs of a run have failed
    PIPELINE_PAUSED = "pipeline.paused"  # the run's files have reached their size limit
    GRAPH_RUN_ENDED = "graph_run.ended"  # completed or cancelled
    GRAPH_RUN_FAILED = "graph_run.failed"
    GRAPH_RUN_ASKS = "graph_run.asks"  # a node waits for a user's answer


class WebhookAnswer(Response):
    id: UUID
    url: str
    events: tuple[Annotated[WebhookEvent, OPEN_ENUM], ...]
    is_active: bool = Field(
        default=True,
        description=(
            "false if the webhook was disabled after days of failed deliveries. Use …/activate to "
            "enable it."
        ),
    )
    created_at: datetime


class WebhookTest(Response):
    """A receiver's response to a test message."""

    is_delivered: bool = Field(description="Whether the response had a status from 200 to 299.")
    status: int | None = Field(
        default=None, description="The status of the response. null if there was none."
    )
    error: str | None = Field(default=None, description="Why there was no response.")


class MadeWebhook(WebhookAnswer):
    secret: str = Field(
        description="The signing secret, shown only here and by …/secret. Every delivery is signed "
        "with it (HMAC-SHA256).",
        examples=["whsec_5f…"],
    )


class Webhooks(Response):
    webhooks: tuple[WebhookAnswer, ...]


class DeliveryStatus(StrEnum):
    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


class DeliveryAnswer(Response):
    """A delivery of an event to a webhook, with its attempts."""

    id: UUID
    job_id: UUID
    event: Annotated[WebhookEvent, OPEN_ENUM]
    status: DeliveryStatus
    tries: int
    last_status: int | None = Field(
        default=None, description="The status of the receiver's last response.", examples=[200]
    )
    last_error: str | None = Field(default=None, description="Why there was no response.")
    next_try_at: datetime | None = Field(
        default=None, description="null if the delivery has ended."
    )
    payload: dict[str, Any] = Field(default_factory=dict)
    created_at: datetime
    ended_at: datetime | None = None


class Deliveries(Page):
    deliveries: tuple[DeliveryAnswer, ...] = Field(description="Newest first.")
    next: UUID | None = Field(
        default=None,
        description="Pass this as `before` to get the next page. null on the last page.",
    )


class AccountUser(Response):
    id: UUID
    name: str | None = None
    email: str | None = None


class AccountTenant(Response):
    id: UUID
    name: str


class AccountLimits(Response):
    """The user's limits and their current usage."""

    max_active_jobs: int = Field(
        description="Maximum number of queued and running jobs of all kinds.", examples=[5]
    )
    active_jobs: int
    max_upload_bytes: int
    max_storage_bytes: int = Field(
        description="Limit for the whole tenant, including announced uploads."
    )
    used_storage_bytes: int


class AccountAnswer(Response):
    """The owner of the key, its permissions, and the account's limits and balance."""

    user: AccountUser
    tenant: AccountTenant
    key: KeyAnswer
    limits: AccountLimits
    balance: int = Field(description="Tokens that are not reserved.")
    top_up_url: str | None = Field(
        default=None, description="Where to buy tokens, if the operator has configured it."
    )


class FoundMedia(Response):
    id: UUID
    kind: str
    filename: str | None = Field(default=None, description="null if the file has expired.")
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
    """The best matches of each kind, newest first."""

    media: tuple[FoundMedia, ...] = ()
    effects: tuple[FoundEffect, ...] = ()
    jobs: tuple[FoundJob, ...] = ()
