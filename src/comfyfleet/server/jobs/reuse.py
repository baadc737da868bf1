"""Reuses results instead of running jobs: computes a job's fingerprint and finds a stored result.

A fingerprint covers everything that determines a result. Tenant and user are not part of it,
because they are matched by their own columns. So a user's results are never revealed to other
users, not even by how soon a job ends.
"""

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from comfyfleet.server.db import Tx
from comfyfleet.server.jobs import service, store
from comfyfleet.server.jobs.caches import ActiveJobLimits
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.model import Job, JobSpec
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants import wallet as ledger
from comfyfleet.server.tenants.model import Tenant

# Files that expire sooner are not reused, because the sweep may be about to delete them.
EXPIRY_MARGIN = timedelta(minutes=10)
# Several equal results are rare. They are from jobs that were submitted at the same moment, or have
# lost their files.
CANDIDATES_PER_JOB_MAX = 4


def fingerprint_of(asked: JobSpec, inputs: Mapping[str, File]) -> str | None:
    """Hashes everything that determines the result. Returns None if the hash of an input file is
    unknown or the job has no user.

    The effect is included, because it decides whether results contain their prompt.
    """
    hashes = {name: file.content_hash for name, file in inputs.items()}
    if asked.user_id is None or not all(hashes.values()):
        return None
    assets = [
        (asset.name, asset.kind, asset.binding, asset.placeholder, hashes.get(asset.name))
        for asset in asked.assets
    ]
    whole = (
        asked.workflow_id,
        asked.workflow_version,
        asked.effect_id,
        asked.stage,
        asked.provider,
        asked.prompt,
        assets,
    )
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


class ReusableResult(NamedTuple):
    """A completed job, without its prompt, and its output files by id."""

    job: Job
    files: Mapping[UUID, File]

    @property
    def source(self) -> dict[str, str | None]:
        """The origin of the result, in the format of a graph run's execution."""
        run_id = self.job.asked.run_id if self.job.asked.run_kind == "graph" else None
        return {"job_id": str(self.job.id), "run_id": str(run_id) if run_id else None}


async def files_kept_since(
    context: JobContext, tenant_id: UUID, *, tenant: Tenant | None = None
) -> datetime | None:
    """Returns the creation time before which files are about to expire, or None if they never do."""
    if tenant is None:
        async with context.central.read() as tx:
            tenant = await tenants.get_tenant(tx, tenant_id)
    days = tenant.retention_days or context.settings.retention_days
    return context.clock() - timedelta(days=days) + EXPIRY_MARGIN if days else None


def asks_for_reuse(asked: Mapping[UUID, JobSpec]) -> bool:
    return any(each.fingerprint for each in asked.values())


async def find_results(
    tx: Tx,
    tenant_id: UUID,
    asked: Mapping[UUID, JobSpec],
    *,
    kept_since: datetime | None,
    now: datetime,
) -> dict[UUID, ReusableResult]:
    """Finds existing results for jobs of one user, by the ids of these jobs.

    The retention time of their files starts again. Must be called before a wallet is locked,
    because files are locked first.
    """
    wanted = {each.fingerprint: each.user_id for each in asked.values() if each.fingerprint}
    user_id = next(iter(wanted.values()), None)
    if user_id is None:
        return {}
    limit = CANDIDATES_PER_JOB_MAX * len(wanted)
    jobs = await store.find_reusable(tx, tenant_id, user_id, list(wanted), limit=limit)
    output_file_ids = [each.file_id for job in jobs for each in job.outputs]
    files = await media.lock_kept(tx, tenant_id, user_id, output_file_ids, since=kept_since)
    results: dict[str | None, ReusableResult] = {}
    for job in jobs:
        ids = {each.file_id for each in job.outputs}
        if ids <= files.keys():
            result = ReusableResult(job, {each: files[each] for each in ids})
            results.setdefault(job.asked.fingerprint, result)
    reused_ids = {file_id for result in results.values() for file_id in result.files}
    await media.keep_longer(tx, tenant_id, reused_ids, now=now)
    return {
        job_id: results[each.fingerprint]
        for job_id, each in asked.items()
        if each.fingerprint in results
    }


async def submit(
    context: JobContext,
    tx: Tx,
    tenant_id: UUID,
    asked: Mapping[UUID, JobSpec],
    *,
    kept_since: datetime | None,
    active_max: ActiveJobLimits,
) -> tuple[list[Job], list[int]]:
    """Adds jobs like `service.submit`. Jobs with an existing result are added as completed, free of
    charge.
    """
    now = context.clock()
    results = await find_results(tx, tenant_id, asked, kept_since=kept_since, now=now)
    reused: list[Job] = []
    if results:
        user_id = next(asked[job_id].user_id for job_id in results)
        if user_id is not None:
            # locked before media, as everywhere
            await ledger.lock_wallet(tx, tenant_id, user_id, now=now)
        taken = {job_id: (asked[job_id], result.job) for job_id, result in results.items()}
        reused = await service.add_reused(tx, tenant_id, taken, new_id=context.new_id, now=now)
    remaining = {job_id: each for job_id, each in asked.items() if job_id not in results}
    if not remaining:
        return reused, []
    added, outbox_ids = await service.submit(
        tx, tenant_id, remaining, now=now, active_max=active_max
    )
    return [*reused, *added], outbox_ids
