"""Whether the books add up: wallets against transactions, transactions against jobs."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from comfyfleet.audit import service as audit
from comfyfleet.db import Database
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import FleetError
from comfyfleet.ledger import service as ledger
from comfyfleet.ledger.model import Drift, JobFacts
from comfyfleet.upkeep import store

PAGE = 1000
# One cause may show in a million places; the first hundred are enough to find it.
AUDITED_MAX = 100
ACTION = "ledger_drift"


class Verified(NamedTuple):
    """`pools_left_out`: those that could not be read, with why. Unseen is not the same as sound."""

    drifts: list[Drift]
    pools_left_out: dict[str, FleetError]

    @property
    def is_sound(self) -> bool:
        return not self.drifts and not self.pools_left_out


async def verify(sides: Sides, tenant_id: UUID | None = None) -> Verified:
    """Of one tenant or of all. A pool that is down keeps no other from being verified."""
    only = await sides.pool_of(tenant_id) if tenant_id else None
    verified = Verified([], {})
    for name, pool in sides.pools.items():
        if only is None or pool is only:
            try:
                verified.drifts.extend(await _verify_pool(pool, tenant_id))
            except FleetError as error:
                verified.pools_left_out[name] = error
    return verified


async def _verify_pool(pool: Database, tenant_id: UUID | None) -> list[Drift]:
    async with pool.look() as tx:
        drifts = await ledger.verify(tx, tenant_id)
    last: tuple[UUID, UUID] | None = None
    while True:
        async with pool.look() as tx:
            page = await store.priced_jobs(tx, tenant_id=tenant_id, after=last, limit=PAGE)
        by_tenant: dict[UUID, list[JobFacts]] = defaultdict(list)
        for owner, facts in page:
            by_tenant[owner].append(facts)
        for owner, jobs in by_tenant.items():
            drifts += await _verify_jobs(pool, owner, jobs)
        if len(page) < PAGE:
            return drifts
        last = (page[-1][0], page[-1][1].job_id)


async def _verify_jobs(pool: Database, tenant_id: UUID, jobs: Sequence[JobFacts]) -> list[Drift]:
    async with pool.look() as tx:
        suspected = await ledger.verify_jobs(tx, tenant_id, jobs)
    ids = {drift.job_id for drift in suspected if drift.job_id}
    if not ids:
        return []
    # A job may have ended between the two looks. While its row is held, it can't.
    async with pool.begin() as tx:
        held = await store.facts_held(tx, tenant_id, ids)
        return await ledger.verify_jobs(tx, tenant_id, held)


async def record(sides: Sides, drifts: Sequence[Drift], *, now: datetime) -> int:
    """Each once, however often it is found; how many are new."""
    new = 0
    async with sides.central.begin() as tx:
        for drift in drifts[:AUDITED_MAX]:
            subject = f"ledger:{drift.tenant_id}/{drift.job_id or drift.user_id}/{drift.fault}"
            if await audit.find(tx, action=ACTION, subject=subject, limit=1):
                continue
            new += 1
            await audit.record(
                tx,
                actor="sweep",
                action=ACTION,
                subject=subject,
                now=now,
                tenant_id=drift.tenant_id,
                details=asdict(drift),
            )
    return new
