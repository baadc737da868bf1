"""Python SDK of the public API. It knows the wire, and nothing of the control plane behind it."""

from comfyfleet.client.answers import ApiError
from comfyfleet.client.batches import BatchHandle
from comfyfleet.client.client import Client
from comfyfleet.client.graph_model import Graph, GraphEvent, GraphRun, Question, Quote, Verdict
from comfyfleet.client.graph_runs import GraphRunHandle
from comfyfleet.client.jobs import JobHandle
from comfyfleet.client.model import (
    Batch,
    Delivery,
    Effect,
    Job,
    JobEvent,
    Key,
    Media,
    MediaResult,
    Output,
    Transaction,
    Wallet,
    Webhook,
)
from comfyfleet.client.patience import Patience
from comfyfleet.client.pipeline_model import (
    Candidate,
    Pipeline,
    PipelineEvent,
    PipelineRun,
    Vote,
)
from comfyfleet.client.pipeline_runs import PipelineRunHandle
from comfyfleet.client.webhooks import SIGNATURE_HEADER, verify_signature

__all__ = [
    "SIGNATURE_HEADER",
    "ApiError",
    "Batch",
    "BatchHandle",
    "Candidate",
    "Client",
    "Delivery",
    "Effect",
    "Graph",
    "GraphEvent",
    "GraphRun",
    "GraphRunHandle",
    "Job",
    "JobEvent",
    "JobHandle",
    "Key",
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
    "Transaction",
    "Verdict",
    "Vote",
    "Wallet",
    "Webhook",
    "verify_signature",
]
