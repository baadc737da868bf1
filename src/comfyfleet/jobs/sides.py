"""The two sides that a job joins, the tenant's and the central one, and what acting on them takes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from uuid import UUID

from comfyfleet.db import Database, Pools
from comfyfleet.dispatch.queue import Queue
from comfyfleet.jobs.caps import Caps
from comfyfleet.jobs.keeping import Documents, Lately, Prompts
from comfyfleet.jobs.news import News
from comfyfleet.jobs.progress import Progresses
from comfyfleet.jobs.tallies import Tallies
from comfyfleet.kernel.clock import Clock
from comfyfleet.kernel.errors import NotFound
from comfyfleet.kernel.settings import Settings
from comfyfleet.storage import ObjectStore
from comfyfleet.tenants import service as tenants

ALONE_FRESH = timedelta(seconds=2)


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
    tallies: Tallies = field(default_factory=Tallies)
    # Whether a worker is the only one who may run what it may run.
    alone: Lately[bool] = field(default_factory=lambda: Lately(ALONE_FRESH))
    # A tenant never moves, so its pool is looked up once.
    _pool_names: dict[UUID, str] = field(default_factory=dict)

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
