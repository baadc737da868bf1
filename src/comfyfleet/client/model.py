"""Exports the API's models under the names used by this client. Unknown fields of newer control
planes are accepted."""

from typing import Literal, TypeAlias

from comfyfleet.api.account import (
    DeliveryAnswer,
    KeyAnswer,
    TransactionAnswer,
    WalletAnswer,
    WebhookAnswer,
)
from comfyfleet.api.graphs import (
    FiringAnswer,
    GraphAnswer,
    GraphRunAnswer,
    QuestionSeen,
    QuoteAnswer,
    TriggerAnswer,
)
from comfyfleet.api.jobs import BatchAnswer, EffectAnswer, JobAnswer
from comfyfleet.api.media import Video
from comfyfleet.api.pipelines import (
    CandidateAnswer,
    PipelineAnswer,
    PipelineRunAnswer,
    VoteAnswer,
)

Batch: TypeAlias = BatchAnswer
Candidate: TypeAlias = CandidateAnswer
Delivery: TypeAlias = DeliveryAnswer
Effect: TypeAlias = EffectAnswer
Firing: TypeAlias = FiringAnswer
Graph: TypeAlias = GraphAnswer
GraphRun: TypeAlias = GraphRunAnswer
Job: TypeAlias = JobAnswer
Media: TypeAlias = Video
Pipeline: TypeAlias = PipelineAnswer
PipelineRun: TypeAlias = PipelineRunAnswer
Question: TypeAlias = QuestionSeen
Quote: TypeAlias = QuoteAnswer
Transaction: TypeAlias = TransactionAnswer
Vote: TypeAlias = VoteAnswer
Wallet: TypeAlias = WalletAnswer
Judgement: TypeAlias = Literal["approve", "reject", "winner"]


class Key(KeyAnswer):
    """An API key. The secret `key` is present only right after its creation."""

    key: str | None = None


class Webhook(WebhookAnswer):
    """A webhook. `secret` is present only right after its creation, and is used by
    `verify_signature`."""

    secret: str | None = None


class Trigger(TriggerAnswer):
    """A trigger. `secret` is present only right after a webhook's creation."""

    secret: str | None = None
