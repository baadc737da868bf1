"""Checks delivered files after the end of their job (presence, size, dimensions), and the ledger:
wallets against transactions, and transactions against jobs. Also generates alerts, which describe
what needs an operator's attention and what to do."""

import asyncio
import io
import logging
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple
from uuid import UUID

from comfyfleet.api.console import Alert, AlertKind
from comfyfleet.errors import FleetError, Unavailable
from comfyfleet.media import HEADER_BYTES, OPEN_OPTIONS, picture_size
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.db import Database, Tx, for_each_pool
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import FleetWorker, StoredReading
from comfyfleet.server.jobs.context import JobContext, in_maintenance
from comfyfleet.server.jobs.diagnosis import read_shortage, requirements_of_workflow
from comfyfleet.server.jobs.files import REFUSALS, confirm_upload
from comfyfleet.server.maintenance import store
from comfyfleet.server.maintenance.retention import delete_objects
from comfyfleet.server.maintenance.store import Checked
from comfyfleet.server.media.model import SNIFF_BYTES, File, is_media_type, kind_of, sniff_type
from comfyfleet.server.metrics import (
    GONE,
    RANGES,
    LaneFigures,
    RollupPoint,
    SystemFigures,
    read_rollup,
)
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.notifications.service import record_audit
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import QueueLane
from comfyfleet.server.storage import LocalStore, ObjectFacts
from comfyfleet.server.tenants import wallet as ledger
from comfyfleet.server.tenants.model import JobLedgerFacts, LedgerDrift


def probe_video(data: bytes) -> Mapping[str, Any]:
    """Returns a video's duration and dimensions. Returns an empty dict if PyAV is missing or the
    video can't be read. Blocks the calling thread."""
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
# Only small media files made by workers are probed, because a demuxer must not process untrusted
# uploads.
FILM_BYTES_MAX = 64 * 1024**2
OUTPUTS = "/ai-jobs/"


async def check_files(context: JobContext, pool: Database) -> int:
    """Checks delivered files. Returns their number."""
    before = context.clock() - ANNOUNCED_FOR
    async with pool.read() as tx:
        files = await store.unchecked(tx, announced_before=before, limit=FILES_PER_PAGE)
    checked: list[Checked] = []
    try:
        for start in range(0, len(files), AT_ONCE_MAX):
            some = files[start : start + AT_ONCE_MAX]
            looked_at = await asyncio.gather(*(_check_file(context, pool, file) for file in some))
            checked += [result for result in looked_at if result]
    finally:
        # If a check fails, store the results of the earlier files anyway, so that the failing file
        # can't block them forever.
        if checked:
            async with pool.transaction() as tx:
                await store.note_checked(tx, checked)
    return len(files)


async def _check_file(context: JobContext, pool: Database, file: File) -> Checked | None:
    """Checks a file. Returns None if it no longer exists."""
    facts = await context.store.head(file.path)
    if file.is_announced and (facts is None or file.user_id is not None):
        await _give_up(context, pool, file)
        return None
    try:
        # An announced file that reaches this point is an operator's upload that no job uses yet.
        file = await confirm_upload(context, pool, file)
    except REFUSALS:
        await _give_up(context, pool, file)
        return None
    try:
        learnt = await _facts_of(context, file, facts)
    except Unavailable:
        raise
    except FleetError as error:
        # Store the error, because the file would otherwise remain the first unchecked file forever.
        learnt = {"check_error": error.code}
    return Checked(file, {**file.metadata, **learnt}, context.clock())


async def _give_up(context: JobContext, pool: Database, file: File) -> None:
    """Deletes an announced file that was not used within a day, unless another process is
    confirming it."""
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
# A single cause may affect a million rows. The first hundred are enough to find it.
AUDITED_MAX = 100
ACTION = "ledger_drift"


class Verified(NamedTuple):
    """The result of a verification. `pools_left_out` contains the pools that could not be read,
    with the errors."""

    drifts: list[LedgerDrift]
    pools_left_out: dict[str, FleetError]

    @property
    def is_sound(self) -> bool:
        return not self.drifts and not self.pools_left_out


async def verify_ledger(context: JobContext, tenant_id: UUID | None = None) -> Verified:
    """Verifies the ledger of one tenant or of all tenants. A pool that is down doesn't stop the
    others."""
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
    # A job may have ended between the two reads. While its row is locked, it can't.
    async with pool.transaction() as tx:
        held = await store.lock_job_facts(tx, tenant_id, ids)
        return await ledger.verify_jobs(tx, tenant_id, held)


async def record_drifts(
    context: JobContext, drifts: Sequence[LedgerDrift], *, now: datetime
) -> int:
    """Writes each drift to the audit log once, even if it is found repeatedly. Returns how many are
    new."""
    new = 0
    async with context.central.transaction() as tx:
        for drift in drifts[:AUDITED_MAX]:
            subject = f"ledger:{drift.tenant_id}/{drift.job_id or drift.user_id}/{drift.fault}"
            if await notifications.find_audit_entries(tx, action=ACTION, subject=subject, limit=1):
                continue
            new += 1
            await record_audit(tx, "sweep", ACTION, subject, now, drift.tenant_id, **asdict(drift))
    return new


LATELY = timedelta(minutes=15)
DAY = timedelta(days=1)
FAILED_MIN, FAILED_SHARE, FAILED_SHARE_BAD = 5, 0.2, 0.5
STUCK_SECONDS, LONG_SECONDS = 60.0, 3600.0
LANES_EXPLAINED_MAX = 10
ROWS_MAX = 100
WORKERS_MAX = 1000
NAMED_MAX = 5
DISK_FREE_BYTES, DISK_FREE_BYTES_BAD = 10 * 1024**3, 2 * 1024**3
ERROR: Literal["error"] = "error"
WARNING: Literal["warning"] = "warning"


@dataclass(frozen=True, slots=True)
class StuckLane:
    workflow: str
    queued: int
    oldest_seconds: float
    shortage: str | None  # why no worker can run its jobs


@dataclass(frozen=True, slots=True)
class Situation:
    """The data from which alerts are derived."""

    lately: RollupPoint  # the last 15 minutes
    workflow_slugs: dict[int, str] = field(default_factory=dict)
    offline: Sequence[str] = ()
    removed: Sequence[str] = ()  # workers that were removed within a day because they were offline
    pending: Sequence[str] = ()
    stuck: Sequence[StuckLane] = ()
    poisoned: int = 0
    full_disks: Sequence[tuple[str, int]] = ()  # the owner of each disk, and its free bytes
    pools_down: Sequence[str] = ()
    is_store_full: bool = False
    rejects_store_writes: bool = False
    maintenance: bool = False


async def find_alerts(plane: ControlPlane, figures: SystemFigures) -> list[Alert]:
    return decide_alerts(await _read_situation(plane, figures))


def decide_alerts(seen: Situation) -> list[Alert]:
    """Returns the alerts, most severe first."""
    alerts = [*_of_system(seen), *_of_jobs(seen), *_of_workers(seen)]
    return sorted(alerts, key=lambda alert: alert.severity != ERROR)


def _of_system(seen: Situation) -> Iterator[Alert]:
    for name in seen.pools_down:
        yield Alert(
            kind=AlertKind.POOL_DOWN,
            severity=ERROR,
            message=f"The tenant database {name} can't be reached.",
            todo="Its tenants' jobs are waiting. Check the database server and the network connection to it.",
            subject=f"pool:{name}",
            count=1,
        )
    if seen.is_store_full:
        yield Alert(
            kind=AlertKind.DISK,
            severity=ERROR,
            message="The object storage is full, and uploads are refused.",
            todo="Add storage, or set COMFYFLEET_RETENTION_DAYS so that old files are deleted.",
            subject=None,
            count=1,
        )
    elif seen.rejects_store_writes:
        yield Alert(
            kind=AlertKind.DISK,
            severity=ERROR,
            message="Writes to the object storage fail, and uploads are refused.",
            todo="See the log for the error. Check whether the storage has free space and can be reached.",
            subject=None,
            count=1,
        )
    for whose, free in seen.full_disks:
        yield Alert(
            kind=AlertKind.DISK,
            severity=ERROR if free < DISK_FREE_BYTES_BAD else WARNING,
            message=f"The disk of {whose} has {free / 1024**3:.1f} GB left.",
            todo="Free some space. On a worker, delete old models and outputs. On the control plane, set "
            "COMFYFLEET_RETENTION_DAYS, or use external object storage.",
            subject=whose if whose.startswith("worker:") else None,
            count=1,
        )
    if seen.maintenance:
        yield Alert(
            kind=AlertKind.MAINTENANCE,
            severity=WARNING,
            message="Maintenance mode is on. Running jobs finish, and no new jobs start.",
            todo="Turn it off when the maintenance is complete.",
            subject=None,
            count=0,
        )


def _of_jobs(seen: Situation) -> Iterator[Alert]:
    for workflow_id, sums in seen.lately.workflows().items():
        failed, completed = round(sums.get("failed", 0)), round(sums.get("completed", 0))
        share = failed / max(1, failed + completed)
        if failed >= FAILED_MIN and share >= FAILED_SHARE:
            slug = seen.workflow_slugs.get(workflow_id, "?")
            yield Alert(
                kind=AlertKind.ERROR_RATE,
                severity=ERROR if share >= FAILED_SHARE_BAD else WARNING,
                message=f"{share:.0%} of the jobs of {slug} failed in the last "
                f"{LATELY.seconds // 60} minutes ({failed} of {failed + completed}).",
                todo="Read the errors of its failed jobs. If they all come from the same worker, drain it. "
                "Otherwise, pause the workflow, fix it, and retry the jobs.",
                subject=f"workflow:{slug}",
                count=failed,
            )
    for lane in seen.stuck:
        yield _stuck(lane)
    if seen.poisoned:
        yield Alert(
            kind=AlertKind.POISONED_JOBS,
            severity=WARNING,
            message=f"{_jobs(seen.poisoned)} set aside within a day, because their workers were lost repeatedly.",
            todo="They may crash workers, for example by using too much memory. Examine one before you retry it.",
            subject=None,
            count=seen.poisoned,
        )


def _stuck(lane: StuckLane) -> Alert:
    minutes = round(lane.oldest_seconds / 60)
    verb, pronoun = ("is", "it") if lane.queued == 1 else ("are", "them")
    waiting = f"{_jobs(lane.queued)} of {lane.workflow} {verb} waiting"
    if lane.shortage is None:
        return Alert(
            kind=AlertKind.STUCK_JOBS,
            severity=WARNING,
            message=f"{waiting}, the oldest for {minutes} minutes.",
            todo="Add workers that can run it, or raise the jobs' priority.",
            subject=f"workflow:{lane.workflow}",
            count=lane.queued,
        )
    return Alert(
        kind=AlertKind.STUCK_JOBS,
        severity=ERROR,
        message=f"{waiting}, and no worker can run {pronoun}: {lane.shortage}",
        todo="Check which workers can run it. Add the missing parts, or assign the workflow to another fleet.",
        subject=f"workflow:{lane.workflow}",
        count=lane.queued,
    )


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count} jobs"


def _of_workers(seen: Situation) -> Iterator[Alert]:
    lost = [*seen.offline, *(worker for worker in seen.removed if worker not in seen.offline)]
    if lost:
        yield Alert(
            kind=AlertKind.WORKERS_LOST,
            severity=ERROR if seen.offline else WARNING,
            message=f"Offline: {_named(lost)}.",
            todo="The jobs went to other workers. Check the machine and the worker's log. The worker rejoins automatically.",
            subject=f"worker:{lost[0]}" if len(lost) == 1 else None,
            count=len(lost),
        )
    if seen.pending:
        yield Alert(
            kind=AlertKind.WORKERS_PENDING,
            severity=WARNING,
            message=f"Waiting for approval: {_named(seen.pending)}.",
            todo="Approve the worker if you know it. Otherwise, revoke it and rotate the fleet's secret.",
            subject=f"worker:{seen.pending[0]}" if len(seen.pending) == 1 else None,
            count=len(seen.pending),
        )


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more


async def _read_situation(plane: ControlPlane, figures: SystemFigures) -> Situation:
    now = plane.clock()
    async with plane.central.read() as tx:
        lately = await _read_lately(tx, now)
        workers = await fleets.workers_of(tx, None, limit=WORKERS_MAX)
        slugs = {
            workflow.id: workflow.slug
            for workflow in await catalog.list_workflows(tx, with_open=True)
        }
        poisoned = await dispatch.list_dispatches(tx, is_poisoned=True, limit=ROWS_MAX)
        removed = await _removed_workers(tx, workers, now)
        stuck = [await _explain(plane, tx, lane) for lane in _waiting_lanes(figures)]
        readings = await fleets.latest_readings(tx, [worker.worker_id for worker in workers])
        maintenance = await in_maintenance(tx)
    return Situation(
        lately=lately,
        workflow_slugs=slugs,
        offline=_in_state("offline", workers, plane, now),
        removed=removed,
        pending=_in_state("pending", workers, plane, now),
        stuck=[lane for lane in stuck if lane.shortage or lane.oldest_seconds > LONG_SECONDS],
        poisoned=sum(row.created_at > now - DAY for row in poisoned),
        full_disks=[*_full_disks(readings, now), *await _own_disk(plane)],
        pools_down=await _pools_down(plane),
        is_store_full=plane.store.outage.is_full,
        rejects_store_writes=plane.store.outage.rejects_writes,
        maintenance=maintenance,
    )


async def _read_lately(tx: Tx, now: datetime) -> RollupPoint:
    rollup = await read_rollup(tx, RANGES["1h"], now=now)
    sums: dict[str, float] = {}
    for point in rollup.points:
        if point.at >= now - LATELY:
            for name, value in point.sums.items():
                sums[name] = sums.get(name, 0.0) + value
    return RollupPoint(now - LATELY, LATELY.total_seconds(), sums)


def _in_state(
    state: str, workers: Iterable[FleetWorker], plane: ControlPlane, now: datetime
) -> list[str]:
    offline_after = plane.settings.offline_after_seconds
    return [
        worker.worker_id
        for worker in workers
        if worker.state_at(now, offline_after_seconds=offline_after) == state
    ]


async def _removed_workers(tx: Tx, workers: Iterable[FleetWorker], now: datetime) -> list[str]:
    """Returns workers that a sweep has removed because they were offline, unless they have
    returned."""
    known = {worker.subject for worker in workers}
    entries = await notifications.find_audit_entries(
        tx, action="deregister", actor="sweep", since=now - DAY, limit=ROWS_MAX
    )
    subjects = dict.fromkeys(entry.subject for entry in entries if entry.subject not in known)
    return [subject.removeprefix("worker:") for subject in subjects]


def _waiting_lanes(figures: SystemFigures) -> list[LaneFigures]:
    """Returns the lanes that have waited longest. Leaves out lanes whose workflow was deleted,
    because they can't be explained."""
    waiting = [
        lane
        for lane in figures.lanes
        if lane.queued and lane.oldest_seconds > STUCK_SECONDS and lane.workflow != GONE
    ]
    return sorted(waiting, key=lambda lane: -lane.oldest_seconds)[:LANES_EXPLAINED_MAX]


async def _explain(plane: ControlPlane, tx: Tx, figures: LaneFigures) -> StuckLane:
    workflow = await catalog.workflow_by_slug(tx, figures.workflow)
    shortage = None
    if workflow.is_paused:
        shortage = f"the workflow {workflow.slug} is paused."
    elif not workflow.is_open:
        version = await catalog.get_version(tx, workflow, None)
        lane = QueueLane(workflow.id, figures.stage, figures.provider)
        requirements = requirements_of_workflow(workflow, version, lane)
        problem = await read_shortage(tx, plane.context, requirements)
        shortage = problem.message if problem else None
    return StuckLane(figures.workflow, figures.queued, figures.oldest_seconds, shortage)


def _full_disks(readings: Mapping[str, StoredReading], now: datetime) -> Iterator[tuple[str, int]]:
    for worker_id, stored in readings.items():
        free = stored.reading.disk_free_bytes
        if free is not None and free < DISK_FREE_BYTES and stored.at > now - LATELY:
            yield f"worker:{worker_id}", free


async def _own_disk(plane: ControlPlane) -> list[tuple[str, int]]:
    if not isinstance(plane.store, LocalStore):
        return []
    free = (await asyncio.to_thread(shutil.disk_usage, plane.store.root)).free
    return [("the control plane", free)] if free < DISK_FREE_BYTES else []


async def _pools_down(plane: ControlPlane) -> list[str]:
    async def ask(pool: Database) -> None:
        async with pool.read() as tx:
            await tx.exec_driver_sql("SELECT 1")

    up = await for_each_pool(plane.pools, ask, "it is reported as down", at_once=True)
    return [name for name in plane.pools if name not in up]
