"""The API's models by the names that this client exports. Fields that a newer control plane adds are let through."""

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
    """An API key. `key`, the secret itself, is present only when it was just made."""

    key: str | None = None


class Webhook(WebhookAnswer):
    """A webhook. `secret` is present only when it was just made; `verify_signature` takes it."""

    secret: str | None = None


class Trigger(TriggerAnswer):
    """A trigger. `secret` is present only when a webhook's was just made."""

    secret: str | None = None
