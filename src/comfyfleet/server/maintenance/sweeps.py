"""The sweeps of a control plane: queue, graphs, pipelines, retention and webhooks."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import TypeAlias

from comfyfleet.errors import FleetError, InvalidInput
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db import Database, for_each_pool
from comfyfleet.server.db.errors import log_level_of
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Fleet, FleetWorker
from comfyfleet.server.graphs.apply import GRAPH_RUN_KIND, GraphContext
from comfyfleet.server.graphs.runner import continue_cut_runs, read_outbox, sweep_runs
from comfyfleet.server.jobs import context
from comfyfleet.server.jobs.batches import admit_all
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.finish import requeue_worker
from comfyfleet.server.jobs.outbox import flush_due
from comfyfleet.server.jobs.reconcile import expire_due_leases, reconcile
from comfyfleet.server.maintenance.checks import (
    FILES_PER_PAGE,
    check_files,
    record_drifts,
    verify_ledger,
)
from comfyfleet.server.maintenance.cloudwatch import scaling_sweeps
from comfyfleet.server.maintenance.retention import (
    ROWS_PER_STEP,
    STEPS_PER_PASS_MAX,
    delete_expired_rows,
    erase_pending_tenants,
    expire_old,
    remove_orphans,
)
from comfyfleet.server.maintenance.runner import Sweep
from comfyfleet.server.media import service as media
from comfyfleet.server.metrics import RollupPass
from comfyfleet.server.notifications import webhooks
from comfyfleet.server.notifications.model import (
    DeliveryStatus,
    RegisteredWebhook,
    WebhookDelivery,
    WebhookResponse,
)
from comfyfleet.server.notifications.service import flush_audits, record_audit
from comfyfleet.server.notifications.webhooks import send_delivery
from comfyfleet.server.pipelines.collector import collect_ended, fail_overdue, remove_old_files
from comfyfleet.server.pipelines.generator import submit_due
from comfyfleet.server.pipelines.run_state import (
    PIPELINE_RUN_KIND,
    STUCK_RUN_KIND,
    flush_audit,
    wake_stuck_runs,
)
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import RequeueReason
from comfyfleet.server.tenant_work import actions as tenant_work
from comfyfleet.server.triggers import fire_due
from comfyfleet.server.triggers import is_any_due as is_any_due_in_pool

log = logging.getLogger(__name__)


async def sync_object_infos(plane: ControlPlane) -> None:
    """Accepts each object_info that workers report. A fleet uses the one of its newest worker."""
    async with plane.central.read() as tx:
        reported = await fleets.reported_object_infos(tx)
        known = {fleet.id: fleet for fleet in await fleets.list_fleets(tx)}
        kinds = await fleets.backend_kinds(tx)
    all_told = {(kind.fleet_id, kind.object_info_hash) for kind in kinds} | reported.items()
    for fleet_id, content_hash in sorted(all_told):
        fleet = known.get(fleet_id)
        if fleet is None or fleet.object_info_hash == content_hash:
            continue
        try:
            is_newest = reported.get(fleet_id) == content_hash
            await _sync_object_info(plane, fleet, content_hash, is_newest=is_newest)
        except FleetError as error:
            log.warning("fleet %s: an object_info was rejected: %s", fleet.name, error.message)


async def _sync_object_info(
    plane: ControlPlane, fleet: Fleet, content_hash: str, *, is_newest: bool
) -> None:
    known = plane.context.caches.object_infos
    key = await known.accept(plane.store, fleet, content_hash)
    if key is None or not is_newest:
        return
    async with plane.central.transaction() as tx:
        await fleets.set_object_info(tx, fleet, key=key, content_hash=content_hash)


OUTBOX_PER_PASS_MAX = 500
DUE_PER_PASS_MAX = 1000
RECONCILE_SECONDS = 60.0
# Interval of the rollup sweep. It is shorter than a minute, so that no rollup is a minute late.
# Without new data, the sweep reads nothing.
ROLLUP_SECONDS = 20.0
# Limit that keeps a pass to about one second, regardless of the backlog. The next pass continues
# where this one ended.
RECONCILED_PER_PASS_MAX = 20_000


def queue_sweeps(plane: ControlPlane) -> Iterator[Sweep]:
    often = plane.settings.sweep_seconds
    yield Sweep("outbox", partial(flush_outboxes, plane), often)
    yield Sweep("notes", partial(flush_notes, plane), often)
    yield Sweep("expiry", partial(expire_leases, plane), often)
    is_due = partial(is_any_due, plane)
    yield Sweep("due", partial(wake_due, plane), min(often, 1.0), is_due=is_due)
    yield Sweep("workers", partial(remove_lost_workers, plane), often)
    yield Sweep("batches", partial(admit_all, plane.context), often)
    yield Sweep("reconcile", partial(reconcile_some, plane), RECONCILE_SECONDS)
    yield Sweep("object_info", partial(sync_object_infos, plane), often)
    yield Sweep("route_calls", plane.routes.remove_expired, RECONCILE_SECONDS)


def rollup_sweeps(plane: ControlPlane) -> Iterator[Sweep]:
    adding = RollupPass(plane.central, plane.pools, plane.settings.offline_after_seconds)

    async def is_due() -> bool:
        return await adding.is_due(plane.clock())

    async def run() -> None:
        await adding.run(plane.clock())

    yield Sweep("rollups", run, ROLLUP_SECONDS, is_due=is_due)


async def flush_outboxes(plane: ControlPlane) -> bool:
    """Delivers due outbox rows. Returns True if there are more."""
    flush = partial(flush_due, plane.context, limit=OUTBOX_PER_PASS_MAX)
    flushed = await for_each_pool(plane.pools, flush, "its outbox is waiting")
    return OUTBOX_PER_PASS_MAX in flushed.values()


async def flush_notes(plane: ControlPlane) -> bool:
    """Copies stored audit entries, and stops the work of deactivated users. Returns True if some
    entries or users are left."""

    async def flush(pool: Database) -> bool:
        has_stops = await tenant_work.stop_deactivated(plane.graphs, pool)
        return await flush_audits(plane.central, pool) or has_stops

    done = await for_each_pool(plane.pools, flush, "its notes are waiting")
    return any(has_more is True for has_more in done.values())


async def expire_leases(plane: ControlPlane) -> None:
    async with plane.central.read() as tx:
        before = await context.last_expiry(tx)
    await expire_due_leases(plane.context, last_pass=before)
    async with plane.central.transaction() as tx:
        await context.set_last_expiry(tx, plane.clock())


async def is_any_due(plane: ControlPlane) -> bool:
    if any(pool.outages.has_ended for _, pool in plane.pools.items()):
        return True
    async with plane.central.read() as tx:
        return await dispatch.is_any_due(tx, plane.clock())


async def wake_due(plane: ControlPlane) -> bool:
    """Wakes due dispatches. Returns True if there are more."""
    for name, pool in plane.pools.items():
        if pool.outages.has_ended:
            async with plane.central.transaction() as tx:
                await dispatch.end_delays(tx, name, now=plane.clock())
            pool.outages.forget_end()
    async with plane.central.transaction() as tx:
        due = await dispatch.wake_due(tx, now=plane.clock(), limit=DUE_PER_PASS_MAX)
    plane.context.queue.arrived(due)
    return len(due) == DUE_PER_PASS_MAX


async def remove_lost_workers(plane: ControlPlane) -> None:
    """Removes workers that have been offline for a long time, which frees their ids and their
    places in the fleet."""
    unseen = plane.clock() - timedelta(seconds=plane.settings.remove_worker_after_seconds)
    async with plane.central.read() as tx:
        lost = await fleets.stale_workers(tx, unseen_since=unseen)
    for worker in lost:
        try:
            await _remove_lost(plane, worker)
        except FleetError as error:
            log.log(
                log_level_of(error),
                "worker %s could not be removed: %s",
                worker.worker_id,
                error.message,
            )


async def _remove_lost(plane: ControlPlane, worker: FleetWorker) -> None:
    unseen = plane.clock() - timedelta(seconds=plane.settings.remove_worker_after_seconds)
    async with plane.central.transaction() as tx:
        removed = await fleets.remove_stale_worker(tx, worker, unseen_since=unseen)
        if removed:
            await record_audit(
                tx,
                "sweep",
                "deregister",
                worker.subject,
                plane.clock(),
                fleet=worker.fleet_name,
                reason="not heard of",
            )
    if removed:
        await requeue_worker(plane.context, worker.worker_id, RequeueReason.EXPIRED)


async def reconcile_some(plane: ControlPlane) -> None:
    async with plane.central.read() as tx:
        after = await context.reconcile_cursor(tx)
    try:
        repairs = await reconcile(plane.context, after=after, rows_max=RECONCILED_PER_PASS_MAX)
    except InvalidInput:  # the stored position is from another version
        repairs = await reconcile(plane.context, rows_max=RECONCILED_PER_PASS_MAX)
    if repairs.next != after:
        async with plane.central.transaction() as tx:
            await context.set_reconcile_cursor(tx, repairs.next)


# Seconds between reads of the outbox, because the end of a job may have been reported to another
# control plane.
GRAPH_OUTBOX_SECONDS = 1.0


def graph_sweeps(plane: ControlPlane) -> Iterator[Sweep]:
    yield Sweep(
        "graph_words",
        partial(in_all_pools, plane, read_outbox),
        min(GRAPH_OUTBOX_SECONDS, plane.settings.sweep_seconds),
        in_turn=False,
        woken_by=partial(plane.context.notifier.subscribe_runs, GRAPH_RUN_KIND),
    )
    yield Sweep("graphs", partial(in_all_pools, plane, sweep_runs), plane.settings.sweep_seconds)
    yield Sweep(
        "graph_slices",
        partial(continue_cut_runs, plane.graphs),
        plane.settings.sweep_seconds,
        in_turn=False,
        woken_by=plane.graphs.cut.subscribe,
    )
    seconds = min(TRIGGER_SECONDS, plane.settings.sweep_seconds)
    is_due = partial(is_any_trigger_due, plane)
    yield Sweep("triggers", partial(fire_triggers, plane), seconds, is_due=is_due)


async def in_all_pools(
    plane: ControlPlane, act: Callable[[GraphContext, Database], Awaitable[None]]
) -> None:
    """Calls `act` for all pools concurrently, so that a slow pool doesn't delay the others."""
    await for_each_pool(
        plane.pools, partial(act, plane.graphs), "its graph runs are waiting", at_once=True
    )


# Seconds between checks for due triggers. The shortest interval of a schedule is one minute.
TRIGGER_SECONDS = 1.0


async def is_any_trigger_due(plane: ControlPlane) -> bool:
    look = partial(is_any_due_in_pool, plane.graphs)
    return any((await for_each_pool(plane.pools, look, "triggers wait", at_once=True)).values())


async def fire_triggers(plane: ControlPlane) -> bool:
    """Fires triggers in all pools. Returns True if there are more."""
    fire = partial(fire_due, plane.graphs)
    done = await for_each_pool(plane.pools, fire, "triggers wait", at_once=True)
    return any(done.values())


RESULTS, WAKES, SUBMITS, UPKEEP, RETENTION = (
    "pipeline_results",
    "pipeline_wakes",
    "pipeline_submits",
    "pipeline_upkeep",
    "pipeline_retention",
)
RETENTION_SECONDS = 3600.0
# Changes wake this sweep earlier. Stuck runs are also checked at this interval without a change.
WAKES_SECONDS = 3600.0
PoolAction: TypeAlias = Callable[[JobContext, Database], Awaitable[object]]


def pipeline_sweeps(plane: ControlPlane) -> Iterator[Sweep]:
    settings = plane.settings
    submit, poll = settings.comfyui_submit_interval, settings.comfyui_poll_interval
    yield Sweep(
        RESULTS,
        partial(_in_all_pools, plane, advance_pipelines),
        poll,
        woken_by=partial(plane.context.notifier.subscribe_runs, PIPELINE_RUN_KIND),
    )
    yield Sweep(
        WAKES,
        partial(_in_all_pools, plane, wake_stuck_runs),
        WAKES_SECONDS,
        in_turn=False,
        woken_by=partial(plane.context.notifier.subscribe_runs, STUCK_RUN_KIND),
    )
    yield Sweep(SUBMITS, partial(_in_all_pools, plane, submit_due), submit)
    yield Sweep(UPKEEP, partial(_in_all_pools, plane, maintain_pipelines), poll)
    yield Sweep(RETENTION, partial(_in_all_pools, plane, remove_old_files), RETENTION_SECONDS)


async def advance_pipelines(context: JobContext, pool: Database) -> bool:
    """Collects ended jobs of pipeline runs, and then submits new jobs within their limits."""
    has_more = await collect_ended(context, pool)
    return await submit_due(context, pool) or has_more


async def maintain_pipelines(context: JobContext, pool: Database) -> bool:
    await fail_overdue(context, pool)
    return await flush_audit(context, pool)


async def _in_all_pools(plane: ControlPlane, act: PoolAction) -> bool:
    """Calls `act` for each pool. Returns True if any pool isn't finished."""
    done = await for_each_pool(
        plane.pools, partial(act, plane.context), "its pipelines are waiting"
    )
    return any(has_more is True for has_more in done.values())


# All taken deliveries are sent concurrently, so that none waits long enough to be taken a second
# time.
AT_ONCE_MAX = 20
TAKEN, REFUSED, UNANSWERED = "taken", "refused", "unanswered"


async def deliver_due(plane: ControlPlane) -> bool:
    """Delivers due webhooks. Returns True if there are more."""
    deliver = partial(_deliver_of, plane)
    counts = await for_each_pool(plane.pools, deliver, "webhooks wait", at_once=True)
    return AT_ONCE_MAX in counts.values()


async def is_any_delivery_due(plane: ControlPlane) -> bool:
    look = partial(_has_deliveries_due, plane)
    return any((await for_each_pool(plane.pools, look, "webhooks wait", at_once=True)).values())


async def _has_deliveries_due(plane: ControlPlane, pool: Database) -> bool:
    async with pool.read() as tx:
        return await webhooks.is_any_delivery_due(tx, plane.clock())


async def _deliver_of(plane: ControlPlane, pool: Database) -> int:
    if not await _has_deliveries_due(plane, pool):
        return 0
    async with pool.transaction() as tx:
        due = await webhooks.take_due_deliveries(tx, now=plane.clock(), limit=AT_ONCE_MAX)
    await asyncio.gather(*(_deliver(plane, pool, *entry) for entry in due))
    return len(due)


async def _deliver(
    plane: ControlPlane, pool: Database, delivery: WebhookDelivery, webhook: RegisteredWebhook
) -> None:
    key = plane.webhook_key
    answer = await send_delivery(plane.outward, webhook, delivery, key=key, now=plane.clock())
    plane.meters.deliveries.labels(_outcome(answer)).inc()
    now, chance = plane.clock(), random.random()  # noqa: S311 - to keep retries apart
    async with pool.transaction() as tx:
        noted = await webhooks.record_attempt(tx, delivery, answer, now=now, chance=chance)
        has_failed = noted is not None and noted.status is DeliveryStatus.FAILED
        is_off = has_failed and await webhooks.disable_if_dead(tx, webhook, now=now)
    if is_off:
        await _audit_disabled(plane, webhook)


def _outcome(answer: WebhookResponse) -> str:
    if answer.is_success:
        return TAKEN
    return UNANSWERED if answer.status is None else REFUSED


async def _audit_disabled(plane: ControlPlane, webhook: RegisteredWebhook) -> None:
    """Records in the audit log that a webhook was disabled. Leaves out its URL, which may contain a
    secret."""
    log.info("webhook %s was disabled, because no delivery has succeeded for days", webhook.id)
    await plane.context.audit("sweep", "switch_off", f"webhook:{webhook.id}", webhook.tenant_id)


ERASING_SECONDS = 5.0
WEBHOOK_SECONDS = 2.0
HOUR_SECONDS = 3600.0


def retention_sweeps(plane: ControlPlane) -> Iterator[Sweep]:
    often = plane.settings.sweep_seconds
    is_due = partial(is_any_delivery_due, plane)
    seconds = min(often, WEBHOOK_SECONDS)
    yield Sweep("webhooks", partial(deliver_due, plane), seconds, is_due=is_due)
    yield Sweep("files", partial(check_all_files, plane), often)
    yield Sweep("erasing", partial(erase_pending_tenants, plane.context), ERASING_SECONDS)
    yield Sweep("retention", partial(expire_all, plane), HOUR_SECONDS)
    yield Sweep("leftovers", partial(remove_all_orphans, plane), HOUR_SECONDS)
    yield Sweep("prune", partial(prune_expired_rows, plane), HOUR_SECONDS)
    yield Sweep("storage", partial(recount_storage, plane), HOUR_SECONDS)
    yield Sweep("ledger", partial(check_ledger, plane), HOUR_SECONDS)


async def check_all_files(plane: ControlPlane) -> bool:
    """Checks delivered files of all pools. Returns True if there are more."""
    check = partial(check_files, plane.context)
    checked = await for_each_pool(plane.pools, check, "its files are not checked for now")
    return FILES_PER_PAGE in checked.values()


async def expire_all(plane: ControlPlane) -> None:
    for tenant_id, count in (await expire_old(plane.context)).items():
        plane.meters.removed.labels("retention").inc(count)
        log.info("%s expired files of tenant %s were deleted", count, tenant_id)


async def remove_all_orphans(plane: ControlPlane) -> None:
    count = await remove_orphans(plane.context)
    plane.meters.removed.labels("leftover").inc(count)
    if count:
        log.info("%s objects without a row were deleted", count)


async def prune_expired_rows(plane: ControlPlane) -> bool:
    """Deletes expired rows of all pools. Returns True if there are more."""
    deleted = await delete_expired_rows(plane.context)
    for what, count in deleted.items():
        plane.meters.removed.labels(what).inc(count)
    summary = ", ".join(f"{count} {what}" for what, count in deleted.items() if count)
    if summary:
        log.info("deleted old rows: %s", summary)
    return any(count >= ROWS_PER_STEP * STEPS_PER_PASS_MAX for count in deleted.values())


async def recount_storage(plane: ControlPlane) -> None:
    recounted = await for_each_pool(
        plane.pools, media.recount, "its storage is not counted for now"
    )
    for missing in recounted.values():
        for tenant_id, size in missing.items():
            log.info("storage of tenant %s was counted %s bytes too low", tenant_id, size)


async def check_ledger(plane: ControlPlane) -> None:
    drifts, left_out = await verify_ledger(plane.context)
    for name, error in left_out.items():
        log.log(
            log_level_of(error), "the ledger of pool %s was not verified: %s", name, error.message
        )
    if drifts or not left_out:
        plane.meters.drifts.set(len(drifts))
    for drift in drifts:
        log.error(
            "the ledger of tenant %s does not add up (%s, user %s, job %s): %s",
            drift.tenant_id,
            drift.fault,
            drift.user_id,
            drift.job_id,
            drift.message,
        )
    if drifts:
        await record_drifts(plane.context, drifts, now=plane.clock())


def all_sweeps(plane: ControlPlane) -> list[Sweep]:
    """Returns the sweeps of a process. With several processes behind one port, the first process
    runs all sweeps. Sweeps that are woken by events in a process run in every process."""
    if plane.siblings is None or plane.siblings.is_first:
        return _sweeps_of(plane)
    return [sweep for sweep in _sweeps_of(plane) if sweep.woken_by is not None]


def _sweeps_of(plane: ControlPlane) -> list[Sweep]:
    return [
        *queue_sweeps(plane),
        *graph_sweeps(plane),
        *pipeline_sweeps(plane),
        *scaling_sweeps(plane),
        *rollup_sweeps(plane),
        *retention_sweeps(plane),
    ]
