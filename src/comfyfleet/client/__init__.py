"""Python SDK for the public API. It depends only on the wire format, and not on the control plane's
code.

Public: the names in `__all__`."""

from comfyfleet.api.graph_reports import RunComparison, RunTimeline
from comfyfleet.api.graphs import GraphEvent, Verdict
from comfyfleet.api.jobs import FollowedJob, JobEvent, Output
from comfyfleet.api.media import MadeShare, MediaResult, ShareAnswer, SharedAnswer
from comfyfleet.api.pipelines import PipelineEvent
from comfyfleet.client.client import SIGNATURE_HEADER, Client, verify_signature
from comfyfleet.client.graphs import GraphRunHandle, rows_from
from comfyfleet.client.jobs import BatchHandle, JobHandle
from comfyfleet.client.model import (
    Batch,
    Candidate,
    Delivery,
    Effect,
    Firing,
    Graph,
    GraphRun,
    Job,
    Key,
    Media,
    Pipeline,
    PipelineRun,
    Question,
    Quote,
    Transaction,
    Trigger,
    Vote,
    Wallet,
    Webhook,
)
from comfyfleet.client.pipelines import PipelineRunHandle
from comfyfleet.transport.error_decoder import ApiError
from comfyfleet.transport.retry import RetryPolicy as Patience

__all__ = [
    "SIGNATURE_HEADER",
    "ApiError",
    "Batch",
    "BatchHandle",
    "Candidate",
    "Client",
    "Delivery",
    "Effect",
    "Firing",
    "FollowedJob",
    "Graph",
    "GraphEvent",
    "GraphRun",
    "GraphRunHandle",
    "Job",
    "JobEvent",
    "JobHandle",
    "Key",
    "MadeShare",
    "Media",
    "MediaResult",
    "Output",
    "Patience",
    "Pipeline",
    "PipelineEvent",
    "PipelineRun",
    "PipelineRunHandle",
    "Question",
    "Quote",
    "RunComparison",
    "RunTimeline",
    "ShareAnswer",
    "SharedAnswer",
    "Transaction",
    "Trigger",
    "Verdict",
    "Vote",
    "Wallet",
    "Webhook",
    "rows_from",
    "verify_signature",
]
