"""A job as a row of its table, and back. Pure."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.effects.model import AssetRef
from comfyfleet.jobs.model import Job, JobStatus, Submission

PINNED = (
    "workflow_id",
    "workflow_slug",
    "workflow_version",
    "prompt",
    "properties",
    "output_node_id",
    "stage",
    "provider",
    "priority",
    "backend_affinity",
    "model_key",
    "model_set",
    "user_id",
    "effect_id",
    "retry_of",
    "idempotency_key",
    "request_hash",
    "video_id",
    "batch_id",
    "batch_position",
    "run_kind",
    "run_id",
    "is_held",
)
KEPT = (
    "id",
    "tenant_id",
    "attempt",
    "lease_number",
    "lease_token",
    "output_file_id",
    "provider_job_id",
    "result_metadata",
    "error_message",
    "raw_error",
    "submitted_at",
    "started_at",
    "completed_at",
)
# Those that a submit says; the rest come later, or from the database.
SUBMITTED = (
    *PINNED,
    "assets",
    "input_file_id",
    "reserved_tokens",
    "id",
    "tenant_id",
    "status",
    "submitted_at",
)


def _asset_row(asset: AssetRef) -> dict[str, Any]:
    return {**asdict(asset), "file_id": str(asset.file_id)}


def _asset(row: Mapping[str, Any]) -> AssetRef:
    return AssetRef(**{**row, "file_id": UUID(row["file_id"])})


def job_of(row: Mapping[Any, Any]) -> Job:
    asked = Submission(
        assets=tuple(map(_asset, row["assets"])),
        price_tokens=row["reserved_tokens"],
        **{name: row[name] for name in PINNED},
    )
    return Job(asked=asked, status=JobStatus(row["status"]), **{name: row[name] for name in KEPT})


def just_added(tenant_id: UUID, job_id: UUID, asked: Submission, now: datetime) -> Job:
    """As its row is when it was just added."""
    kept: dict[str, Any] = dict.fromkeys(KEPT)
    kept |= {"id": job_id, "tenant_id": tenant_id, "submitted_at": now}
    kept |= {"attempt": 0, "lease_number": 0}
    return Job(asked=asked, status=JobStatus.QUEUED, **kept)


def row_of(tenant_id: UUID, job_id: UUID, asked: Submission, now: datetime) -> dict[str, Any]:
    return {
        **{name: getattr(asked, name) for name in PINNED},
        "prompt": dict(asked.prompt),
        "properties": dict(asked.properties),
        "assets": [_asset_row(each) for each in asked.assets],
        "input_file_id": asked.input_file_id,
        "reserved_tokens": asked.price_tokens,
        "id": job_id,
        "tenant_id": tenant_id,
        "status": JobStatus.QUEUED,
        "submitted_at": now,
    }
