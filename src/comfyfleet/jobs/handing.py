"""From a lease to what the worker gets: the job started on the tenant's side, and its files' URLs."""

import asyncio
import logging
from datetime import timedelta
from uuid import UUID

from comfyfleet.db import Database
from comfyfleet.db.outages import level_of
from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.model import ENDED, Lease, Requeue, Waiter
from comfyfleet.effects.catalogue import service as catalogue
from comfyfleet.effects.catalogue.model import RunTerms
from comfyfleet.effects.model import AssetRef
from comfyfleet.files import service as files
from comfyfleet.files.model import File, output_key, renamed
from comfyfleet.jobs import service, store
from comfyfleet.jobs.arrival import suffix_of
from comfyfleet.jobs.complaints import UNKNOWN, sayable
from comfyfleet.jobs.delivery import is_to_strip
from comfyfleet.jobs.ending import fail, requeue
from comfyfleet.jobs.model import Failure, Job, Submission, delivery_of
from comfyfleet.jobs.settling import end_dispatch_of
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import FleetError, NotFound, Unavailable
from comfyfleet.wire import files as wire_files
from comfyfleet.wire import messages as wire

log = logging.getLogger(__name__)
ANY_OUTPUT = wire_files.WantedOutput(name="output")
PICTURE = wire_files.WantedOutput(name="output.png", content_type="image/png")
PAYLOAD_DELAY = timedelta(seconds=30)
# So many leases may turn out to belong to ended jobs before the worker is told to come again.
ENDED_IN_A_ROW_MAX = 50


async def next_job(
    sides: Sides, waiter: Waiter, *, wait_seconds: float, as_of: int | None = None
) -> wire.Job | None:
    """Leases until a job is found that can be run, or none is left."""
    for _ in range(ENDED_IN_A_ROW_MAX):
        lease = await sides.queue.lease(waiter, wait_seconds=wait_seconds, as_of=as_of)
        if lease is None:
            return None
        handed = await hand_out(sides, lease, gives_back=not waiter.tells_leases)
        if handed:
            return handed
    return None


async def hand_out(sides: Sides, lease: Lease, *, gives_back: bool) -> wire.Job | None:
    """None if the job has ended or can't be run now; the dispatch is then put right.

    Whoever hangs up meanwhile is not cut off in a transaction: a connection that is cancelled looks
    like one that was lost, and the job would be put off. `gives_back`: then the lease goes back. A
    worker that tells which leases it knows gets it with its next poll, which may have begun already.
    """
    handing = asyncio.ensure_future(_hand_out(sides, lease))
    try:
        return await asyncio.shield(handing)
    except asyncio.CancelledError:
        if await handing and gives_back:
            await _give_back(sides, lease)
        raise


async def _give_back(sides: Sides, lease: Lease) -> None:
    try:
        await requeue(sides, lease.dispatch_id, lease.token, Requeue.WAITER_GONE)
    except FleetError as error:
        log.info("dispatch %s was not given back: %s", lease.dispatch_id, error.message)


async def _hand_out(sides: Sides, lease: Lease) -> wire.Job | None:
    try:
        pool = await sides.pool_of(lease.tenant_id)
        async with pool.say() as tx:
            job = await service.start(tx, lease, now=sides.clock())
        sides.news.tell(lease.job_id)
        if job is None:
            await _bring_in_line(sides, pool, lease)
            return None
        return await payload(sides, pool, lease, job)
    except Unavailable as error:
        await _delay(sides, lease, error)
    except FleetError as error:
        await _fail_for_good(sides, lease, error)
    return None


async def _bring_in_line(sides: Sides, pool: Database, lease: Lease) -> None:
    async with pool.look() as tx:
        job = await store.get(tx, lease.tenant_id, lease.job_id)
    if job and job.status.is_active:
        log.warning("dispatch %s was leased anew before it was started", lease.dispatch_id)
        return
    async with sides.central.look() as tx:
        row = await dispatch.get(tx, lease.dispatch_id)
    if row.status not in ENDED:
        await end_dispatch_of(sides, row, job)


async def _delay(sides: Sides, lease: Lease, error: FleetError) -> None:
    log.log(level_of(error), "dispatch %s is put off: %s", lease.dispatch_id, error.message)
    now = sides.clock()
    async with sides.central.begin() as tx:
        await dispatch.requeue(
            tx,
            lease.dispatch_id,
            lease.token,
            Requeue.PAYLOAD_DELAYED,
            now=now,
            detail=error.message,
            not_before=now + PAYLOAD_DELAY,
        )


async def _fail_for_good(sides: Sides, lease: Lease, error: FleetError) -> None:
    log.log(level_of(error), "dispatch %s can't be run: %s", lease.dispatch_id, error.message)
    said = sayable(error.message)
    message = "The job could not be prepared" + ("." if said == UNKNOWN else f": {said}")
    why = Failure(message, f"{error.code}: {error}")
    await fail(sides, lease.dispatch_id, lease.token, why)


async def payload(sides: Sides, pool: Database, lease: Lease, job: Job) -> wire.Job:
    terms, settings = await _run_terms(sides, job.asked), sides.settings
    return wire.Job(
        dispatch_id=lease.dispatch_id,
        job_id=job.id,
        lease_token=lease.token,
        lease_number=lease.number,
        attempt=lease.attempt,
        lease_expires_at=lease.expires_at,
        lease_seconds=settings.lease_seconds,
        provider=job.asked.provider,  # type: ignore[arg-type]
        workflow_slug=job.asked.workflow_slug,
        prompt=dict(job.asked.prompt),
        output_node_id=job.asked.output_node_id,
        assets=await assets(sides, pool, job),
        outputs=(await output_slot(sides, job, lease.token, likely_output(job.asked)),),
        run_limit_seconds=terms.run_limit_seconds,
        max_output_bytes=settings.max_output_bytes,
        model_key=job.asked.model_key,
        model_set=job.asked.model_set,
        strip_metadata=is_to_strip(job.asked, terms),
    )


async def _run_terms(sides: Sides, asked: Submission) -> RunTerms:
    async def read() -> RunTerms:
        async with sides.central.look() as tx:
            return await catalogue.run_terms(tx, asked.workflow_id, asked.effect_id)

    key = asked.workflow_id, asked.effect_id
    return await sides.run_terms.get(key, read, now=sides.clock())


async def assets(
    sides: Sides, pool: Database, job: Job, names: frozenset[str] | None = None
) -> tuple[wire_files.Asset, ...]:
    """URLs are made anew each time that they are asked for."""
    wanted = [each for each in job.asked.assets if names is None or each.name in names]
    if not wanted:
        return ()
    async with pool.look() as tx:
        found = [await files.get(tx, job.tenant_id, each.file_id) for each in wanted]
    pairs = zip(wanted, found, strict=True)
    return tuple([await _asset(sides, ref, file) for ref, file in pairs])


async def _asset(sides: Sides, ref: AssetRef, file: File) -> wire_files.Asset:
    if file.size is None:
        raise NotFound(f"the file of {ref.name!r} was never uploaded", property=ref.name)
    return wire_files.Asset(
        name=ref.name,
        # The ending that a backend goes by is told by the bytes, and never by a customer.
        filename=renamed(file.filename, suffix_of(file.filename, file.mime_type)),
        url=await sides.store.url_to_get(file.path, seconds=sides.settings.url_seconds),
        content_hash=file.content_hash,
        size=file.size,
        binding=ref.binding,
        placeholder=ref.placeholder,
        is_primary_input=ref.is_primary_input,
    )


def likely_output(asked: Submission) -> wire_files.WantedOutput:
    """A guess that saves a worker one question: most prompts save pictures, as PNG."""
    named = {asked.output_node_id} if asked.output_node_id else asked.prompt.keys()
    saves = any(asked.prompt.get(each, {}).get("class_type") == "SaveImage" for each in named)
    return PICTURE if saves else ANY_OUTPUT


async def output_slot(
    sides: Sides, job: Job, token: UUID, wanted: wire_files.WantedOutput
) -> wire_files.OutputSlot:
    key = output_key(job.tenant_id, job.id, delivery_of(token, job.id), wanted.name)
    put = await sides.store.url_to_put(
        key, content_type=wanted.content_type, seconds=sides.settings.url_seconds
    )
    return wire_files.OutputSlot(name=wanted.name, url=put.url, headers=dict(put.headers))
