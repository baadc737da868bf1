"""Results that are taken again instead of run: the fingerprint of a job, and the search for a result that is there.

A fingerprint covers all that decides on a result. Who may have it is no part of it, as tenant and user are looked up
by their own columns: what a user has made is shown to nobody else, not even by how soon a job ends."""

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

# What expires sooner is not taken: the sweep may be about to delete it.
EXPIRY_MARGIN = timedelta(minutes=10)
# Equal results are rare: two jobs that were submitted at the same moment, or one whose files are gone.
CANDIDATES_PER_JOB_MAX = 4


def fingerprint_of(asked: JobSpec, inputs: Mapping[str, File]) -> str | None:
    """Hashes what decides on the result; None if the bytes of an input are not known, or it is no user's.

    The effect is a part of it, as it decides whether results carry the prompt that made them.
    """
    hashes = {name: file.content_hash for name, file in inputs.items()}
    if asked.user_id is None or not all(hashes.values()):
        return None
    assets = [
        (each.name, each.kind, each.binding, each.placeholder, hashes.get(each.name))
        for each in asked.assets
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
    """A completed job, without its prompt, and all files that it has made, by id."""

    job: Job
    files: Mapping[UUID, File]

    @property
    def source(self) -> dict[str, str | None]:
        """Where it came from, as an execution of a graph run says it."""
        run_id = self.job.asked.run_id if self.job.asked.run_kind == "graph" else None
        return {"job_id": str(self.job.id), "run_id": str(run_id) if run_id else None}


async def files_kept_since(
    context: JobContext, tenant_id: UUID, *, tenant: Tenant | None = None
) -> datetime | None:
    """Returns the age at which files are about to expire; None: they never do."""
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
    """Finds the results that jobs of one user need not make, by the ids of these jobs.

    The retention of their files begins anew. To be called before a wallet is locked: files come first.
    """
    wanted = {each.fingerprint: each.user_id for each in asked.values() if each.fingerprint}
    user_id = next(iter(wanted.values()), None)
    if user_id is None:
        return {}
    limit = CANDIDATES_PER_JOB_MAX * len(wanted)
    jobs = await store.find_reusable(tx, tenant_id, user_id, list(wanted), limit=limit)
    made = [each.file_id for job in jobs for each in job.outputs]
    files = await media.lock_kept(tx, tenant_id, user_id, made, since=kept_since)
    found: dict[str | None, ReusableResult] = {}
    for job in jobs:
        ids = {each.file_id for each in job.outputs}
        if ids <= files.keys():
            result = ReusableResult(job, {each: files[each] for each in ids})
            found.setdefault(job.asked.fingerprint, result)
    taken = {file_id for result in found.values() for file_id in result.files}
    await media.keep_longer(tx, tenant_id, taken, now=now)
    return {
        job_id: found[each.fingerprint]
        for job_id, each in asked.items()
        if each.fingerprint in found
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
    """Adds jobs, as `service.submit` does; those whose results are there are added as completed, for nothing."""
    now = context.clock()
    found = await find_results(tx, tenant_id, asked, kept_since=kept_since, now=now)
    reused: list[Job] = []
    if found:
        user_id = next(asked[job_id].user_id for job_id in found)
        if user_id is not None:
            await ledger.lock_wallet(tx, tenant_id, user_id, now=now)  # before media, as all others
        taken = {job_id: (asked[job_id], result.job) for job_id, result in found.items()}
        reused = await service.add_reused(tx, tenant_id, taken, new_id=context.new_id, now=now)
    left = {job_id: each for job_id, each in asked.items() if job_id not in found}
    if not left:
        return reused, []
    added, outbox_ids = await service.submit(tx, tenant_id, left, now=now, active_max=active_max)
    return [*reused, *added], outbox_ids
