"""The two sides that a job joins, the tenant's and the central one, and what acting on them takes."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from uuid import UUID

from comfyfleet.db import Database, Pools
from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.queue import Queue
from comfyfleet.effects.catalogue.model import RunTerms
from comfyfleet.effects.models import models_of
from comfyfleet.fleets.abilities import Abilities
from comfyfleet.fleets.offers import ModelUse
from comfyfleet.jobs import store
from comfyfleet.jobs.caps import ActiveMax, Caps
from comfyfleet.jobs.deferred import Deferred
from comfyfleet.jobs.keeping import Documents, Lately, Prompts
from comfyfleet.jobs.model import Shortage
from comfyfleet.jobs.news import News
from comfyfleet.jobs.progress import Progresses
from comfyfleet.jobs.tallies import Tallies
from comfyfleet.kernel.clock import Clock
from comfyfleet.kernel.errors import FleetError, NotFound
from comfyfleet.kernel.settings import Settings
from comfyfleet.storage import ObjectStore
from comfyfleet.tenants import service as tenants

log = logging.getLogger(__name__)
LOOKS_AT_ONCE = 32
ALONE_FRESH = timedelta(seconds=2)
SHORTAGE_FRESH = timedelta(seconds=2)
RUN_TERMS_FRESH = timedelta(seconds=2)


@dataclass(frozen=True)
class Sides:
    """Never one transaction over both, and none held across a network call."""

    central: Database
    pools: Pools
    store: ObjectStore
    queue: Queue
    settings: Settings
    clock: Clock
    new_id: Callable[[], UUID]
    caps: Caps = field(default_factory=Caps)
    documents: Documents = field(default_factory=Documents)
    prompts: Prompts = field(default_factory=Prompts)
    progresses: Progresses = field(default_factory=Progresses)
    news: News = field(default_factory=News)
    deferred: Deferred = field(default_factory=Deferred)
    tallies: Tallies = field(default_factory=Tallies)
    abilities: Abilities = field(default_factory=Abilities)
    # Two workers who could run jobs of some lanes, or all that there are.
    live_workers: Lately[frozenset[str]] = field(default_factory=lambda: Lately(ALONE_FRESH))
    # Whether nobody can run jobs of a kind.
    shortages: Lately[Shortage | None] = field(default_factory=lambda: Lately(SHORTAGE_FRESH))
    # By workflow and effect. They are no orders: a job that was handed out before keeps them, too, and
    # what a delivery goes by is read then.
    run_terms: Lately[RunTerms] = field(default_factory=lambda: Lately(RUN_TERMS_FRESH))
    # All who wait may be woken at once; only so many are then looked at side by side.
    looks: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LOOKS_AT_ONCE))
    # How many polls of each worker wait in this process.
    waiting_polls: Counter[str] = field(default_factory=Counter)
    # A tenant never moves, so its pool is looked up once.
    _pool_names: dict[UUID, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queue.model_sets.find = self._models_of

    async def _models_of(self, dispatch_id: int) -> tuple[ModelUse, ...] | None:
        """Of a job that another process has enqueued, or this one before it was started anew."""
        try:
            async with self.central.look() as tx:
                row = await dispatch.get(tx, dispatch_id)
            pool = await self.pool_of(row.tenant_id)
            async with pool.look() as tx:
                job = await store.get(tx, row.tenant_id, row.job_id)
        except FleetError as error:
            log.warning("the models of dispatch %d are not known: %s", dispatch_id, error.message)
            return None
        return None if job is None else models_of(job.asked.prompt)

    @property
    def active_max(self) -> ActiveMax:
        return ActiveMax(
            self.settings.max_active_jobs_per_user, self.settings.max_active_jobs_per_tenant
        )

    async def pool_of(self, tenant_id: UUID) -> Database:
        return self.pools[await self._pool_name(tenant_id)]

    async def pool_name_of(self, tenant_id: UUID) -> str | None:
        """None: there is no such tenant."""
        try:
            return await self._pool_name(tenant_id)
        except NotFound:
            return None

    async def _pool_name(self, tenant_id: UUID) -> str:
        name = self._pool_names.get(tenant_id)
        if name is None:
            async with self.central.look() as tx:
                name = (await tenants.get(tx, tenant_id)).pool
            self._pool_names[tenant_id] = name
        return name
