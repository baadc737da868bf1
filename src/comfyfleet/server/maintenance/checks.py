"""Checks delivered files after their job has ended (present, how large, which measures), and the ledger: wallets
against transactions, transactions against jobs."""

import asyncio
import io
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from comfyfleet.errors import FleetError, Unavailable
from comfyfleet.media import HEADER_BYTES, OPEN_OPTIONS, picture_size
from comfyfleet.server.db import Database
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.files import REFUSALS, confirm_upload
from comfyfleet.server.maintenance import store
from comfyfleet.server.maintenance.retention import delete_objects
from comfyfleet.server.maintenance.store import Checked
from comfyfleet.server.media.model import SNIFF_BYTES, File, is_media_type, kind_of, sniff_type
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.notifications.service import record_audit
from comfyfleet.server.storage import ObjectFacts
from comfyfleet.server.tenants import wallet as ledger
from comfyfleet.server.tenants.model import JobLedgerFacts, LedgerDrift


def probe_video(data: bytes) -> Mapping[str, Any]:
    """Reads a video's measures; empty without PyAV, or if it can't be read. Blocking."""
    try:
        import av
    except ImportError:
        return {}
    try:
        with av.open(io.BytesIO(data), "r", options=dict(OPEN_OPTIONS)) as container:
            facts: dict[str, Any] = {}
            if container.duration is not None:
                facts["duration_seconds"] = round(container.duration / av.time_base, 3)
            for stream in container.streams.video[:1]:
                facts |= {"width": stream.width, "height": stream.height}
            return facts
    except (av.FFmpegError, ValueError, EOFError):
        return {}


log = logging.getLogger(__name__)
FILES_PER_PAGE = 100
AT_ONCE_MAX = 4
ANNOUNCED_FOR = timedelta(days=1)
# Only our workers' films, and only small ones: a demuxer is no thing to feed with what strangers send.
FILM_BYTES_MAX = 64 * 1024**2
OUTPUTS = "/ai-jobs/"


async def check_files(context: JobContext, pool: Database) -> int:
    """Checks delivered files and returns how many."""
    before = context.clock() - ANNOUNCED_FOR
    async with pool.read() as tx:
        found = await store.unchecked(tx, announced_before=before, limit=FILES_PER_PAGE)
    checked: list[Checked] = []
    try:
        for start in range(0, len(found), AT_ONCE_MAX):
            some = found[start : start + AT_ONCE_MAX]
            looked_at = await asyncio.gather(*(_check_file(context, pool, each) for each in some))
            checked += [each for each in looked_at if each]
    finally:
        # Also of those before one that can't be looked at: it must not hold them up for ever.
        if checked:
            async with pool.transaction() as tx:
                await store.note_checked(tx, checked)
    return len(found)


async def _check_file(context: JobContext, pool: Database, file: File) -> Checked | None:
    """Checks one file; None if it is gone."""
    facts = await context.store.head(file.path)
    if file.is_announced and (facts is None or file.user_id is not None):
        await _give_up(context, pool, file)
        return None
    try:
        # Else it is an operator's upload that no job has named yet.
        file = await confirm_upload(context, pool, file)
    except REFUSALS:
        await _give_up(context, pool, file)
        return None
    try:
        learnt = await _facts_of(context, file, facts)
    except Unavailable:
        raise
    except FleetError as error:
        # It would stand before all others for ever.
        learnt = {"check_error": error.code}
    return Checked(file, {**file.metadata, **learnt}, context.clock())


async def _give_up(context: JobContext, pool: Database, file: File) -> None:
    """Removes an announced file that nobody linked for a day, unless that happens at this moment."""
    async with pool.transaction() as tx:
        is_gone = await store.remove_announced(tx, file)
    if is_gone:
        await delete_objects(context, [file])


async def _facts_of(
    context: JobContext, file: File, facts: ObjectFacts | None
) -> Mapping[str, Any]:
    if facts is None:
        log.warning("file %s of tenant %s has no object", file.id, file.tenant_id)
        return {"is_missing": True}
    first = await context.store.get_start(file.path, HEADER_BYTES)
    really = sniff_type(first[:SNIFF_BYTES])
    learnt: dict[str, Any] = {
        "stored_bytes": facts.size,
        "real_type": really,
        "is_as_claimed": is_media_type(file.mime_type, first[:SNIFF_BYTES]),
    }
    if facts.size != file.size:
        log.warning("file %s has %s bytes, not %s", file.id, facts.size, file.size)
    if size := picture_size(really, first):
        learnt |= {"width": size[0], "height": size[1]}
    is_ours = OUTPUTS in file.path and facts.size <= FILM_BYTES_MAX
    if is_ours and kind_of(really or "") in ("video", "audio"):
        learnt |= await asyncio.to_thread(probe_video, await context.store.get(file.path))
    return learnt


DRIFTS_PER_PAGE = 1000
# One cause may show in a million places; the first hundred are enough to find it.
AUDITED_MAX = 100
ACTION = "ledger_drift"


class Verified(NamedTuple):
    """The result of a verification; `pools_left_out` are those that could not be read, with the
    reason.
    """

    drifts: list[LedgerDrift]
    pools_left_out: dict[str, FleetError]

    @property
    def is_sound(self) -> bool:
        return not self.drifts and not self.pools_left_out


async def verify_ledger(context: JobContext, tenant_id: UUID | None = None) -> Verified:
    """Verifies the ledger of one tenant or of all; a pool that is down doesn't stop the others."""
    only = await context.pool_of(tenant_id) if tenant_id else None
    verified = Verified([], {})
    for name, pool in context.pools.items():
        if only is None or pool is only:
            try:
                verified.drifts.extend(await _verify_pool(pool, tenant_id))
            except FleetError as error:
                verified.pools_left_out[name] = error
    return verified


async def _verify_pool(pool: Database, tenant_id: UUID | None) -> list[LedgerDrift]:
    async with pool.read() as tx:
        drifts = await ledger.verify(tx, tenant_id)
    last: tuple[UUID, UUID] | None = None
    while True:
        async with pool.read() as tx:
            page = await store.priced_jobs(
                tx, tenant_id=tenant_id, after=last, limit=DRIFTS_PER_PAGE
            )
        by_tenant: dict[UUID, list[JobLedgerFacts]] = defaultdict(list)
        for owner, facts in page:
            by_tenant[owner].append(facts)
        for owner, jobs in by_tenant.items():
            drifts += await _verify_jobs(pool, owner, jobs)
        if len(page) < DRIFTS_PER_PAGE:
            return drifts
        last = (page[-1][0], page[-1][1].job_id)


async def _verify_jobs(
    pool: Database, tenant_id: UUID, jobs: Sequence[JobLedgerFacts]
) -> list[LedgerDrift]:
    async with pool.read() as tx:
        suspected = await ledger.verify_jobs(tx, tenant_id, jobs)
    ids = {drift.job_id for drift in suspected if drift.job_id}
    if not ids:
        return []
    # A job may have ended between the two looks. While its row is held, it can't.
    async with pool.transaction() as tx:
        held = await store.lock_job_facts(tx, tenant_id, ids)
        return await ledger.verify_jobs(tx, tenant_id, held)


async def record_drifts(
    context: JobContext, drifts: Sequence[LedgerDrift], *, now: datetime
) -> int:
    """Audits each drift once, however often it is found; returns how many are new."""
    new = 0
    async with context.central.transaction() as tx:
        for drift in drifts[:AUDITED_MAX]:
            subject = f"ledger:{drift.tenant_id}/{drift.job_id or drift.user_id}/{drift.fault}"
            if await notifications.find_audit_entries(tx, action=ACTION, subject=subject, limit=1):
                continue
            new += 1
            await record_audit(tx, "sweep", ACTION, subject, now, drift.tenant_id, **asdict(drift))
    return new
