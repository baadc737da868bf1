"""Reuses results instead of running jobs: computes fingerprints of jobs and finds stored results.

A fingerprint covers everything that influences a result. Tenant and user are not part of it,
because they are separate columns that must match as well. So a user's results are never revealed to
other users, not even by the time that a job takes.
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

# Files that expire within this time are not reused, because the sweep may be about to delete them.
EXPIRY_MARGIN = timedelta(minutes=10)
# Maximum number of matching results that are considered for a job. There is rarely more than one.
# More exist only if identical jobs were submitted at the same moment or files of a result were
# deleted.
CANDIDATES_PER_JOB_MAX = 4


def fingerprint_of(spec: JobSpec, inputs: Mapping[str, File]) -> str | None:
    """Hashes everything that influences a job's result. Returns None if the hash of an input file
    is unknown or the job has no user.

    The effect is included, because it decides whether results contain the embedded prompt.
    """
    hashes = {name: file.content_hash for name, file in inputs.items()}
    if spec.user_id is None or not all(hashes.values()):
        return None
    assets = [
        (asset.name, asset.kind, asset.binding, asset.placeholder, hashes.get(asset.name))
        for asset in spec.assets
    ]
    whole = (
        spec.workflow_id,
        spec.workflow_version,
        spec.effect_id,
        spec.stage,
        spec.provider,
        spec.prompt,
        assets,
    )
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


class ReusableResult(NamedTuple):
    """A completed job, loaded without its prompt, and its output files by id."""

    job: Job
    files: Mapping[UUID, File]

    @property
    def source(self) -> dict[str, str | None]:
        """The origin of the result, in the format of a graph run's execution."""
        run_id = self.job.spec.run_id if self.job.spec.run_kind == "graph" else None
        return {"job_id": str(self.job.id), "run_id": str(run_id) if run_id else None}


async def files_kept_since(
    context: JobContext, tenant_id: UUID, *, tenant: Tenant | None = None
) -> datetime | None:
    """Returns the creation time before which files have expired or soon will. Returns None if the
    tenant's files never expire.
    """
    if tenant is None:
        async with context.central.read() as tx:
            tenant = await tenants.get_tenant(tx, tenant_id)
    days = tenant.retention_days or context.settings.retention_days
    return context.clock() - timedelta(days=days) + EXPIRY_MARGIN if days else None


def asks_for_reuse(specs: Mapping[UUID, JobSpec]) -> bool:
    return any(spec.fingerprint for spec in specs.values())


async def find_results(
    tx: Tx,
    tenant_id: UUID,
    specs: Mapping[UUID, JobSpec],
    *,
    kept_since: datetime | None,
    now: datetime,
) -> dict[UUID, ReusableResult]:
    """Finds existing results for new jobs of a user. Returns the results by the ids of the new
    jobs.

    The retention time of the reused files starts again. Must be called before a wallet is locked,
    because files are always locked first.
    """
    users = {spec.fingerprint: spec.user_id for spec in specs.values() if spec.fingerprint}
    user_id = next(iter(users.values()), None)
    if user_id is None:
        return {}
    limit = CANDIDATES_PER_JOB_MAX * len(users)
    jobs = await store.find_reusable(tx, tenant_id, user_id, list(users), limit=limit)
    output_file_ids = [output.file_id for job in jobs for output in job.outputs]
    files = await media.lock_kept(tx, tenant_id, user_id, output_file_ids, since=kept_since)
    results: dict[str | None, ReusableResult] = {}
    for job in jobs:
        ids = {output.file_id for output in job.outputs}
        if ids <= files.keys():
            result = ReusableResult(job, {file_id: files[file_id] for file_id in ids})
            results.setdefault(job.spec.fingerprint, result)
    reused_ids = {file_id for result in results.values() for file_id in result.files}
    await media.keep_longer(tx, tenant_id, reused_ids, now=now)
    return {
        job_id: results[spec.fingerprint]
        for job_id, spec in specs.items()
        if spec.fingerprint in results
    }


async def submit(
    context: JobContext,
    tx: Tx,
    tenant_id: UUID,
    specs: Mapping[UUID, JobSpec],
    *,
    kept_since: datetime | None,
    active_max: ActiveJobLimits,
) -> tuple[list[Job], list[int]]:
    """Adds jobs like `service.submit`, except that jobs with an existing result are added as
    completed, free of charge.
    """
    now = context.clock()
    results = await find_results(tx, tenant_id, specs, kept_since=kept_since, now=now)
    reused: list[Job] = []
    if results:
        user_id = next(specs[job_id].user_id for job_id in results)
        if user_id is not None:
            # The wallet is locked before media, in the same order as everywhere else.
            await ledger.lock_wallet(tx, tenant_id, user_id, now=now)
        sources = {job_id: (specs[job_id], result.job) for job_id, result in results.items()}
        reused = await service.add_reused(tx, tenant_id, sources, new_id=context.new_id, now=now)
    remaining = {job_id: spec for job_id, spec in specs.items() if job_id not in results}
    if not remaining:
        return reused, []
    added, outbox_ids = await service.submit(
        tx, tenant_id, remaining, now=now, active_max=active_max
    )
    return [*reused, *added], outbox_ids
