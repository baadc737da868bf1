"""Handles worker heartbeats, which extend a lease, renew file URLs and return orders. Also
records the prompt that each attempt sent to its backend.
"""

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

from comfyfleet.api.sizes import is_larger
from comfyfleet.api.values import Asset
from comfyfleet.api.worker import Complete, Fail, FilledIn, Heartbeat, HeartbeatAnswer
from comfyfleet.errors import LeaseLost
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import FleetWorker
from comfyfleet.server.jobs import service
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.files import LeaseKey, report_live
from comfyfleet.server.jobs.finish import require_lease
from comfyfleet.server.jobs.lease import asset_urls, output_slot
from comfyfleet.server.jobs.model import Job, JobAttempt
from comfyfleet.server.jobs.outbox import notify
from comfyfleet.server.jobs.progress import preview_in
from comfyfleet.server.jobs.submit import get_job
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import Dispatch, DispatchStatus, ExtendedLease

VALUE_CHARACTERS_MAX = 2000
FILLED_IN_CHARACTERS_MAX = 64_000
# Every input takes at least seven characters of JSON (two quotes, a colon, a value, a comma and two
# spaces), so more inputs than this always exceed the limit.
FILLED_IN_INPUTS_MAX = FILLED_IN_CHARACTERS_MAX // 7
LEFT_OUT = "(left out)"


async def record_attempt(
    context: JobContext, message: Heartbeat | Complete | Fail, lease: Dispatch | ExtendedLease
) -> None:
    """Records the prompt that was sent to the backend. Only the first report of a lease is stored.
    The write is deferred, because no caller waits for it.
    """
    if message.filled_in is None:
        return
    attempt = JobAttempt(
        job_id=lease.job_id,
        lease_number=lease.lease_number,
        tenant_id=lease.tenant_id,
        attempt=lease.attempts,
        worker_id=lease.worker_id or "",
        started_at=context.clock(),
        filled_in=sanitize(message.filled_in),
    )
    context.deferred.note_attempt(await context.pool_of(lease.tenant_id), attempt)


async def note_last(
    context: JobContext, message: Complete | Fail, *, worker_id: str
) -> Dispatch | None:
    """Records the attempt from the final report, in case the job ended before its first heartbeat.
    Returns the dispatch, or None if there was nothing to record.
    """
    if message.filled_in is None:
        return None
    lease = await require_lease(context, message.dispatch_id, message.lease_token, worker_id)
    await record_attempt(context, message, lease)
    return lease


def sanitize(filled_in: FilledIn) -> dict[str, dict[str, Any]]:
    """Removes secrets from URLs in a prompt's inputs, and limits the size of the values."""
    if sum(map(len, filled_in.values())) > FILLED_IN_INPUTS_MAX:
        return {}
    sanitized = {
        node_id: {name: _sanitize_value(value) for name, value in inputs.items()}
        for node_id, inputs in filled_in.items()
    }
    return sanitized if len(json.dumps(sanitized)) <= FILLED_IN_CHARACTERS_MAX else {}


def _sanitize_value(value: Any) -> Any:
    if isinstance(value, str):
        plain = value.encode(errors="backslashreplace").decode().replace("\0", "")
        return strip_url_secrets(plain)[:VALUE_CHARACTERS_MAX]
    if is_larger(value, bytes_max=VALUE_CHARACTERS_MAX):
        return LEFT_OUT
    return value if len(json.dumps(value)) <= VALUE_CHARACTERS_MAX else LEFT_OUT


def strip_url_secrets(text: str) -> str:
    """Removes the query, user name and password from a URL, because they may grant access."""
    if "://" not in text:
        return text
    try:
        parts = urlsplit(text.strip())
    except ValueError:
        return LEFT_OUT
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def sent_prompt(job: Job, attempt: JobAttempt) -> dict[str, Any] | None:
    """Returns the prompt as it was sent to the backend, or None if it was deleted after its
    retention time.
    """
    if not job.spec.prompt or attempt.filled_in is None:
        return None
    prompt = dict(job.spec.prompt)
    for node_id, inputs in attempt.filled_in.items():
        node = prompt.get(node_id, {})
        prompt[node_id] = {**node, "inputs": {**node.get("inputs", {}), **inputs}}
    return prompt


CANCELLED = HeartbeatAnswer(cancelled=True)


async def heartbeat(
    context: JobContext, message: Heartbeat, *, worker: FleetWorker | None = None
) -> HeartbeatAnswer:
    """Extends a lease and returns orders for its worker. Without `worker`, any caller with the
    lease token is accepted.
    """
    with context.queue.heartbeat_waiters.waiting(
        message.dispatch_id, worker.worker_id if worker else ""
    ) as news:
        answer = await _extend(context, message, worker)
        if message.wait_seconds and answer.is_without_orders:
            try:
                async with asyncio.timeout(message.wait_seconds):
                    await news.wait()
            except TimeoutError:
                return answer
            answer = await _extend(context, message, await _reread_worker(context, worker))
    return answer


async def _reread_worker(context: JobContext, worker: FleetWorker | None) -> FleetWorker | None:
    if worker is None:
        return None
    async with context.central.read() as tx:
        return await fleets.reauthenticate(tx, worker.worker_id, worker.key_hash)


async def _extend(
    context: JobContext, message: Heartbeat, worker: FleetWorker | None
) -> HeartbeatAnswer:
    worker_id = worker.worker_id if worker else None
    try:
        beat = await context.queue.extend(
            message.dispatch_id, message.lease_token, started=message.started, worker_id=worker_id
        )
    except LeaseLost:
        return await _cancelled_before(context, message, worker_id)
    if beat.begins:
        await _begin_job(context, beat, message.lease_token)
    await record_attempt(context, message, beat)
    if message.events:
        key = LeaseKey(beat.tenant_id, beat.job_id, message.lease_token)
        await report_live(context, key, message.events, message.outputs, report=message.report)
    is_watched = context.previews.is_watched(beat.job_id)
    if is_watched and (picture := preview_in(message)) is not None:
        # The preview is stored after the messages of the same heartbeat, so that watchers are
        # notified of both together.
        context.previews.put(beat.tenant_id, beat.job_id, picture)
    if message.progress:
        context.caches.progress.note(message.lease_token, message.progress)
        context.notifier.tell(beat.job_id)
    must_stop = beat.cancel_requested
    if must_stop and not await _is_interrupted(context, beat):
        return await _end_cancelled(context, message, beat.job_id)
    answer = HeartbeatAnswer(
        interrupt=must_stop,
        lease_expires_at=beat.expires_at,
        drain=worker is not None and worker.is_draining,
        recall=beat.recall_requested,
        previews=is_watched,
        new_token=worker.next_key if worker else None,
        facts_wanted=context.queue.facts.take(worker.worker_id) if worker else None,
    )
    return await _with_files(context, message, answer)


async def _begin_job(context: JobContext, beat: ExtendedLease, token: UUID) -> None:
    async with context.tenant_transaction(beat.tenant_id) as tx:
        job = await service.begin(tx, beat.tenant_id, beat.job_id, token, now=context.clock())
    if job is not None:
        notify(context, job)


async def _is_interrupted(context: JobContext, beat: ExtendedLease) -> bool:
    """Whether a cancelled job continues until its backend has reported how the run ended. Only
    gateway jobs do, because ComfyUI clients expect that report.
    """
    async with context.tenant(beat.tenant_id) as tx:
        job = await service.find(tx, beat.tenant_id, beat.job_id)
    return job is not None and job.spec.gateway is not None and job.status.is_active


async def _end_cancelled(context: JobContext, message: Heartbeat, job_id: UUID) -> HeartbeatAnswer:
    """Ends the cancelled dispatch, because the response to this heartbeat notifies the worker."""
    context.caches.progress.forget(message.lease_token)
    context.previews.forget(job_id)
    async with context.central.transaction() as tx:
        await dispatch.end(
            tx,
            message.dispatch_id,
            message.lease_token,
            DispatchStatus.CANCELLED,
            now=context.clock(),
        )
    return CANCELLED


async def _cancelled_before(
    context: JobContext, message: Heartbeat, worker_id: str | None
) -> HeartbeatAnswer:
    """Responds to a repeated heartbeat of a cancelled dispatch, whose first response may have been
    lost. Raises LeaseLost in all other cases.
    """
    row = await require_lease(context, message.dispatch_id, message.lease_token, worker_id)
    if row.status != DispatchStatus.CANCELLED:
        raise LeaseLost("the lease is no longer held, so nothing was changed")
    return CANCELLED


async def _with_files(
    context: JobContext, message: Heartbeat, answer: HeartbeatAnswer
) -> HeartbeatAnswer:
    if not message.want_outputs and not message.want_assets:
        return answer
    row: Dispatch = await require_lease(context, message.dispatch_id, message.lease_token)
    job = await get_job(context, row.tenant_id, row.job_id)
    slots = tuple(
        [
            await output_slot(context, job, message.lease_token, output)
            for output in message.want_outputs
        ]
    )
    fresh: tuple[Asset, ...] = ()
    if message.want_assets:
        pool = await context.pool_of(row.tenant_id)
        fresh = await asset_urls(context, pool, job, frozenset(message.want_assets))
    return answer.model_copy(update={"outputs": slots, "assets": fresh})
