"""What a person should know of: bursts of failures, and a run that fills the store."""

import logging
from datetime import datetime, timedelta

from comfyfleet.db import Tx
from comfyfleet.jobs.sides import Sides
from comfyfleet.pipelines import journal
from comfyfleet.pipelines.model import PipelineJob, RunStatus, StoredRun
from comfyfleet.pipelines.store import candidates, jobs, runs
from comfyfleet.webhooks import service as webhooks
from comfyfleet.webhooks.model import WebhookEvent

log = logging.getLogger(__name__)
STORAGE_LIMIT = "storage_limit"


async def raise_alert(
    tx: Tx, sides: Sides, stored: StoredRun, row: PipelineJob, error: str | None, *, now: datetime
) -> bool:
    """Once for a burst: not again while its window lasts."""
    window = timedelta(seconds=sides.settings.pipeline_alert_seconds)
    if stored.alerted_at and stored.alerted_at > now - window:
        return False
    failures = await jobs.failures_since(tx, stored.id, now - window)
    if failures < sides.settings.pipeline_alert_failures:
        return False
    log.error(
        "alert: %s jobs of pipeline run %s failed within %s s, the last with: %s",
        failures,
        stored.id,
        sides.settings.pipeline_alert_seconds,
        error,
    )
    told = {
        "pipeline_run_id": str(stored.id),
        "failures": failures,
        "window_seconds": sides.settings.pipeline_alert_seconds,
        "error": error,
    }
    await runs.change_run(tx, stored.id, {"alerted_at": now})
    await journal.record(tx, stored, "alert", told, now=now)
    await _announce(tx, sides, stored, row, WebhookEvent.PIPELINE_ALERT, told, now)
    return True


async def pause_if_full(
    tx: Tx, sides: Sides, stored: StoredRun, row: PipelineJob, *, now: datetime
) -> bool:
    """A run is stopped before it fills the store for all."""
    most = stored.run.limits.bytes
    if most is None or stored.run.status != RunStatus.ACTIVE:
        return False
    used = await candidates.bytes_of(tx, stored.id)
    if used < most:
        return False
    log.warning("pipeline run %s is paused: its files have %s bytes", stored.id, used)
    told = {"pipeline_run_id": str(stored.id), "bytes": used, "limit": most}
    told["reason"] = STORAGE_LIMIT
    changes = {"status": RunStatus.PAUSED, "pause_reason": STORAGE_LIMIT}
    await runs.change_run(tx, stored.id, changes)
    await journal.record(tx, stored, "paused", told, now=now)
    await _announce(tx, sides, stored, row, WebhookEvent.PIPELINE_PAUSED, told, now)
    return True


async def _announce(
    tx: Tx,
    sides: Sides,
    stored: StoredRun,
    row: PipelineJob,
    event: WebhookEvent,
    told: dict[str, object],
    now: datetime,
) -> None:
    """In the same transaction: told once, by the job that was one too many."""
    sides.tallies.pipeline_alerts.labels(event).inc()
    await webhooks.announce(
        tx,
        stored.tenant_id,
        stored.user_id,
        row.id,
        event,
        told,
        new_id=sides.new_id,
        now=now,
    )
