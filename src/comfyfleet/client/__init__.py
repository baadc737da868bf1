"""Python SDK of the public API. It knows the wire, and nothing of the control plane behind it."""

from comfyfleet.client.answers import ApiError
from comfyfleet.client.batches import BatchHandle
from comfyfleet.client.client import Client
from comfyfleet.client.jobs import JobHandle
from comfyfleet.client.model import (
    Batch,
    Delivery,
    Effect,
    Job,
    JobEvent,
    Key,
    Media,
    Output,
    Transaction,
    Wallet,
    Webhook,
)
from comfyfleet.client.patience import Patience
from comfyfleet.client.webhooks import SIGNATURE_HEADER, verify_signature

__all__ = [
    "SIGNATURE_HEADER",
    "ApiError",
    "Batch",
    "BatchHandle",
    "Client",
    "Delivery",
    "Effect",
    "Job",
    "JobEvent",
    "JobHandle",
    "Key",
    "Media",
    "Output",
    "Patience",
    "Transaction",
    "Wallet",
    "Webhook",
    "verify_signature",
]
