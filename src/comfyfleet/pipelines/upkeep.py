"""Jobs that take too long, jobs that nobody hears of, and files of runs that are long over."""

import logging
from datetime import datetime, timedelta
from uuid import UUID

from comfyfleet.db import Database
from comfyfleet.files import service as files
from comfyfleet.jobs import service as jobs
from comfyfleet.jobs.model import Failure
from comfyfleet.jobs.settling import deliver
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import FleetError, NotFound
from comfyfleet.pipelines import journal
from comfyfleet.pipelines.model import StoredRun
from comfyfleet.pipelines.store import candidates, runs
from comfyfleet.pipelines.store import jobs as job_rows
from comfyfleet.pipelines.store.jobs import Underway

log = logging.getLogger(__name__)
JOBS_PER_PASS_MAX = 5000
RUNS_PER_PASS_MAX = 20
FILES_PER_PASS_MAX = 500


async def fail_overdue(sides: Sides, pool: Database) -> int:
    """How many were failed. Their ends leave words, as all ends do."""
    async with pool.look() as tx:
        underway = await job_rows.underway(tx, limit=JOBS_PER_PASS_MAX)
    failed = 0
    for each in underway:
        why = overdue(each, sides.clock(), abandoned_hours=sides.settings.abandoned_job_hours)
        if why:
            failed += await _fail(sides, pool, each, why)
    return failed


def overdue(each: Underway, now: datetime, *, abandoned_hours: int) -> str | None:
    """The time that a job waits in the queue is not its own; that nobody takes it up ends it too."""
    if each.status == "processing" and each.started_at:
        if now - each.started_at > timedelta(seconds=each.timeout_seconds):
            return f"It took longer than {each.timeout_seconds} s."
        return None
    if now - (each.started_at or each.submitted_at) > timedelta(hours=abandoned_hours):
        return f"Nothing was heard of it for {abandoned_hours} hours."
    return None


async def _fail(sides: Sides, pool: Database, each: Underway, why: str) -> bool:
    async with pool.begin() as tx:
        failed, words = await jobs.give_up(
            tx,
            each.tenant_id,
            each.job_id,
            Failure(why),
            new_id=sides.new_id,
            now=sides.clock(),
        )
    if failed is None:
        return False
    await deliver(sides, pool, [failed], words)
    return True


async def remove_old_files(sides: Sides, pool: Database) -> bool:
    """The index stays: who was made out of whom, how, and how it was judged. True: there is more."""
    unchanged = sides.clock() - timedelta(days=sides.settings.pipeline_keep_days)
    async with pool.look() as tx:
        old = await runs.old_runs(tx, unchanged_since=unchanged, limit=RUNS_PER_PASS_MAX)
    for stored in old:
        try:
            await _remove_files(sides, pool, stored)
        except FleetError as error:
            log.warning("files of pipeline run %s stay for now: %s", stored.id, error.message)
        except Exception:
            log.exception("files of pipeline run %s stay for now", stored.id)
    return len(old) == RUNS_PER_PASS_MAX


async def _remove_files(sides: Sides, pool: Database, stored: StoredRun) -> None:
    async with pool.look() as tx:
        kept = await candidates.files_of(tx, stored.id, limit=FILES_PER_PASS_MAX)
    for candidate_id, file_id in kept.items():
        await _remove_file(sides, pool, stored, candidate_id, file_id)
    if len(kept) == FILES_PER_PASS_MAX:
        return  # the rest with the next pass
    async with pool.begin() as tx:
        now = sides.clock()
        await runs.change_run(tx, stored.id, {"files_removed_at": now})
        await journal.record(tx, stored, "files_removed", {"last": len(kept)}, now=now)


async def _remove_file(
    sides: Sides, pool: Database, stored: StoredRun, candidate_id: UUID, file_id: UUID
) -> None:
    """The object first: a row that is left behind is found again, an object without one is not."""
    try:
        async with pool.look() as tx:
            file = await files.get(tx, stored.tenant_id, file_id)
        await sides.store.delete(file.path)
        async with pool.begin() as tx:
            await candidates.forget_file(tx, candidate_id)
            await files.delete(tx, stored.tenant_id, file_id)
    except NotFound:
        async with pool.begin() as tx:
            await candidates.forget_file(tx, candidate_id)
