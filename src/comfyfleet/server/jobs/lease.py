"""Builds a worker's payload from a lease: starts the job in the tenant's database and signs its
file URLs.
"""

import asyncio
import logging
import math
from datetime import timedelta
from typing import Any
from uuid import UUID

from comfyfleet.api import values as wire_files
from comfyfleet.api import worker as wire
from comfyfleet.api.values import INLINE_BYTES_MAX
from comfyfleet.errors import FleetError, NotFound, Refused, Unavailable
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import AssetRef, RunTerms
from comfyfleet.server.db import Database
from comfyfleet.server.db.errors import log_level_of
from comfyfleet.server.jobs import service, store
from comfyfleet.server.jobs.ai_marks import delivery_rules
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.files import suffix_of
from comfyfleet.server.jobs.finish import fail, requeue
from comfyfleet.server.jobs.model import (
    PREVIEW_METHOD,
    Failure,
    Job,
    JobSpec,
    needs_key,
    output_folder_of,
    paid_seconds,
    tells_results_live,
)
from comfyfleet.server.jobs.outbox import end_dispatch, notify
from comfyfleet.server.jobs.progress import ANY_JOB, ONLY_LISTS
from comfyfleet.server.jobs.unreported import guess_output
from comfyfleet.server.jobs.user_messages import UNKNOWN, to_plain_sentence
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File, output_key, replace_suffix
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import ENDED, DispatchLease, RequeueReason, Waiter

log = logging.getLogger(__name__)
# If a tenant's database is unavailable, its jobs are delayed before they can be leased again. The
# delay in seconds is as long as the outage so far, within these limits. The jobs are released as
# soon as the outage ends.
DELAY_SECONDS_MIN, DELAY_SECONDS_MAX = 2.0, 30.0
# Maximum time in seconds until a lease is on disk. No caller waits for that.
LEASE_SYNC_SECONDS = 0.25
# Maximum number of leases that one poll tries. After that many jobs that have ended or can't run,
# the worker must poll again.
LEASES_TRIED_MAX = 50


async def lease_next(
    context: JobContext, waiter: Waiter, *, wait_seconds: float, as_of: int | None = None
) -> wire.Job | None:
    """Leases dispatches until one can be run or no more are available."""
    for _ in range(LEASES_TRIED_MAX):
        lease = await context.queue.lease(waiter, wait_seconds=wait_seconds, as_of=as_of)
        if lease is None:
            return None
        payload = await build_payload(context, lease, gives_back=not waiter.tells_leases)
        if payload:
            return payload
    return None


async def build_payload(
    context: JobContext, lease: DispatchLease, *, gives_back: bool
) -> wire.Job | None:
    """Builds a worker's payload. If the job has ended or can't be run now, updates the dispatch and
    returns None.

    If the caller disconnects, the transaction isn't cancelled, because a cancelled connection looks
    like a lost one and the job would be delayed. With `gives_back`, the dispatch is requeued
    instead. Workers that report their leases don't need that: their next poll, which may already
    have started, returns the lease again.
    """
    handing = asyncio.ensure_future(_build_payload(context, lease))
    try:
        return await asyncio.shield(handing)
    except asyncio.CancelledError:
        if await handing and gives_back:
            await _give_back(context, lease)
        raise


async def _give_back(context: JobContext, lease: DispatchLease) -> None:
    try:
        await requeue(context, lease.dispatch_id, lease.token, RequeueReason.WAITER_GONE)
    except FleetError as error:
        log.info("dispatch %s could not be requeued: %s", lease.dispatch_id, error.message)


async def _build_payload(context: JobContext, lease: DispatchLease) -> wire.Job | None:
    pool: Database | None = None
    try:
        pool = await context.pool_of(lease.tenant_id)
        job = await context.payload_reads.run(pool, _start(context, pool, lease))
        # This doesn't wait until the lease is on disk. If a power failure undoes the lease, the
        # job runs again. If the job ends earlier, the lease is written together with its end.
        for database in (context.central, pool):
            database.persist_soon(LEASE_SYNC_SECONDS)
        if job is None:
            context.notifier.tell(lease.job_id)
            await _sync_dispatch(context, pool, lease)
            return None
        notify(context, job, ONLY_LISTS)
        return await payload_of(context, pool, lease, job)
    except Unavailable as error:
        await _delay(context, pool, lease, error)
    except FleetError as error:
        await _fail_permanently(context, lease, error)
    return None


async def _start(context: JobContext, pool: Database, lease: DispatchLease) -> Job | None:
    """Starts the job. Tries twice, so that a connection that was lost while idle doesn't delay the
    job.
    """
    try:
        async with pool.execute_one(persists=False) as tx:
            return await service.start(tx, lease, now=context.clock())
    except Unavailable:
        async with pool.execute_one(persists=False) as tx:
            return await service.start(tx, lease, now=context.clock())


async def _sync_dispatch(context: JobContext, pool: Database, lease: DispatchLease) -> None:
    async with pool.read() as tx:
        job = await store.get(tx, lease.tenant_id, lease.job_id)
    if job and job.status.is_active:
        log.warning("dispatch %s was leased again before its job was started", lease.dispatch_id)
        return
    async with context.central.read() as tx:
        row = await dispatch.get(tx, lease.dispatch_id)
    if row.status not in ENDED:
        await end_dispatch(context, row, job)


async def _delay(
    context: JobContext, pool: Database | None, lease: DispatchLease, error: FleetError
) -> None:
    log.log(log_level_of(error), "dispatch %s is delayed: %s", lease.dispatch_id, error.message)
    now = context.clock()
    away = DELAY_SECONDS_MAX if pool is None else pool.outages.seconds_away
    seconds = min(max(away, DELAY_SECONDS_MIN), DELAY_SECONDS_MAX)
    async with context.central.transaction() as tx:
        await dispatch.requeue(
            tx,
            lease.dispatch_id,
            lease.token,
            RequeueReason.PAYLOAD_DELAYED,
            now=now,
            detail=error.message,
            not_before=now + timedelta(seconds=seconds),
        )


async def _fail_permanently(context: JobContext, lease: DispatchLease, error: FleetError) -> None:
    log.log(log_level_of(error), "dispatch %s can't be run: %s", lease.dispatch_id, error.message)
    sentence = to_plain_sentence(error.message)
    message = "The job could not be prepared" + ("." if sentence == UNKNOWN else f": {sentence}")
    why = Failure(message, f"{error.code}: {error}")
    await fail(context, lease.dispatch_id, lease.token, why)


def _run_limit(spec: JobSpec, terms: RunTerms) -> int:
    paid = paid_seconds(spec)
    limit = terms.run_limit_seconds
    # Limited to the whole seconds that the reservation pays for, but at least one second.
    return limit if paid is None else max(1, min(limit, math.floor(paid)))


async def payload_of(
    context: JobContext, pool: Database, lease: DispatchLease, job: Job
) -> wire.Job:
    terms, settings = await _run_terms(context, job.spec), context.settings
    keys = await _partner_keys(context, job)
    rules = delivery_rules(job.spec, terms)
    return wire.Job(
        dispatch_id=lease.dispatch_id,
        job_id=job.id,
        lease_token=lease.token,
        lease_number=lease.number,
        attempt=lease.attempt,
        lease_expires_at=lease.expires_at,
        lease_seconds=settings.lease_seconds,
        provider=job.spec.provider,  # type: ignore[arg-type]
        workflow_slug=job.spec.workflow_slug,
        tenant_id=job.tenant_id,
        prompt=dict(job.spec.prompt),
        output_node_id=job.spec.output_node_id,
        assets=await context.payload_reads.run(pool, asset_urls(context, pool, job)),
        outputs=(await output_slot(context, job, lease.token, guess_output(job.spec)),),
        run_limit_seconds=_run_limit(job.spec, terms),
        max_output_bytes=settings.max_output_bytes,
        model_key=job.spec.model_key,
        model_set=job.spec.model_set,
        strip_metadata=rules is not None and rules.strips,
        ai_mark=rules.mark if rules is not None else None,
        records_run=job.spec.gateway is not None,
        holds_results=job.spec.gateway is not None and not tells_results_live(job.spec),
        live_outputs=tells_results_live(job.spec),
        inline_bytes_max=0 if job.spec.gateway is not None else INLINE_BYTES_MAX,
        numbers_reports=True,
        extra_data=sent_extra_data(job.spec, is_watched=_is_watched(context, job)),
        has_secrets=bool(keys),
        secrets=keys,
    )


async def _partner_keys(context: JobContext, job: Job) -> dict[str, str]:
    """Returns the caller's keys for paid services. Raises Refused if they are no longer in
    memory.
    """
    if not needs_key(job.spec):
        return {}
    keys = await context.partner_keys.get(job.id)
    if keys is None:
        raise Refused("the key for paid services is no longer in memory; submit the job again")
    return dict(keys)


def _is_watched(context: JobContext, job: Job) -> bool:
    """Whether a viewer watches the previews of this job, of all its user's jobs, or of all running
    jobs.
    """
    user_id = job.spec.user_id
    watchable = (job.id, ANY_JOB) if user_id is None else (job.id, user_id, ANY_JOB)
    return any(context.previews.is_watched(watched_id) for watched_id in watchable)


def sent_extra_data(spec: JobSpec, *, is_watched: bool) -> dict[str, Any]:
    """Returns the part of the client's extra data that is sent to the backend. Ids and keys are
    excluded. If the job is watched, previews are enabled unless the client chose a preview method.
    """
    extra_data = (spec.gateway or {}).get("extra_data") or {}
    sent = {
        name: extra_data[name] for name in ("extra_pnginfo", PREVIEW_METHOD) if name in extra_data
    }
    return {PREVIEW_METHOD: "auto", **sent} if is_watched else sent


async def _run_terms(context: JobContext, spec: JobSpec) -> RunTerms:
    async def read() -> RunTerms:
        async with context.central.read() as tx:
            return await catalog.run_terms(tx, spec.workflow_id, spec.effect_id)

    key = spec.workflow_id, spec.effect_id
    return await context.caches.run_terms.get(key, read, now=context.clock())


async def asset_urls(
    context: JobContext, pool: Database, job: Job, names: frozenset[str] | None = None
) -> tuple[wire_files.Asset, ...]:
    """Signs new URLs for the job's input files. If `names` is set, only includes these files."""
    refs = [ref for ref in job.spec.assets if names is None or ref.name in names]
    if not refs:
        return ()
    async with pool.read() as tx:
        files = [await media.get_file(tx, job.tenant_id, ref.file_id) for ref in refs]
    pairs = zip(refs, files, strict=True)
    return tuple([await _asset_url(context, ref, file) for ref, file in pairs])


async def _asset_url(context: JobContext, ref: AssetRef, file: File) -> wire_files.Asset:
    if file.size is None:
        raise NotFound(f"the file for {ref.name!r} was not uploaded", property=ref.name)
    return wire_files.Asset(
        name=ref.name,
        # Backends rely on the filename's suffix, so it is derived from the content instead of the
        # customer's filename.
        filename=replace_suffix(file.filename, suffix_of(file.filename, file.mime_type)),
        url=await context.store.url_to_get(file.path, seconds=context.settings.url_seconds),
        content_hash=file.content_hash,
        size=file.size,
        binding=ref.binding,
        placeholder=ref.placeholder,
        is_primary_input=ref.is_primary_input,
    )


async def output_slot(
    context: JobContext, job: Job, token: UUID, output: wire_files.WantedOutput
) -> wire_files.OutputSlot:
    key = output_key(job.tenant_id, job.id, output_folder_of(token, job.id), output.name)
    put = await context.store.url_to_put(
        key, content_type=output.content_type, seconds=context.settings.url_seconds
    )
    return wire_files.OutputSlot(name=output.name, url=put.url, headers=dict(put.headers))
