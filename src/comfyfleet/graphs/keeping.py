"""Runs that were advanced lately, in memory: a step then costs what it touches, not all records.

Only a shortcut: a run is used from here only while the database has the same revision.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.graphs import store
from comfyfleet.graphs.plan import Plan
from comfyfleet.graphs.progress import Progress
from comfyfleet.graphs.runs import Key, Run, job_id
from comfyfleet.graphs.saving import restored
from comfyfleet.graphs.snapshot import restored_plan
from comfyfleet.graphs.stored import Head
from comfyfleet.kernel.errors import NotFound

RUNS_KEPT_MAX = 500
RECORDS_KEPT_MAX = 200_000


class Kept(NamedTuple):
    head: Head
    plan: Plan
    run: Run
    revision: int

    @property
    def jobs(self) -> Mapping[UUID, tuple[Key, int]]:
        """Of executions that wait for a job's word: its id, and whose attempt it is."""
        keys = self.run.in_flight or _stopping(self.run)
        found = ((key, self.run.record(key).attempt) for key in keys)
        return {job_id(self.run.id, key, attempt): (key, attempt) for key, attempt in found}


def _stopping(run: Run) -> frozenset[Key]:
    """Once a run is over, none is in flight: those that were told to stop are looked for."""
    if not run.status.is_over:
        return frozenset()
    return frozenset(key for key, record in run.records.items() if record.status == "stopping")


class Runs:
    def __init__(self) -> None:
        self._kept: OrderedDict[UUID, Kept] = OrderedDict()
        self._records = 0
        self._told: OrderedDict[UUID, tuple[float, float]] = OrderedDict()

    def at_hand(self, tenant_id: UUID, run_id: UUID) -> Kept | None:
        """As it was when last seen here, for who finds out before anything is written."""
        kept = self._kept.get(run_id)
        return kept if kept and kept.head.tenant_id == tenant_id else None

    async def get(self, tx: Tx, tenant_id: UUID, run_id: UUID) -> Kept:
        kept = self._kept.get(run_id)
        revision = await store.revision_of(tx, tenant_id, run_id)
        if revision is None:
            raise NotFound(f"there is no graph run {run_id}")
        if kept is None or kept.revision != revision:
            kept = await self._read(tx, tenant_id, run_id, kept)
        self.keep(kept)
        return kept

    async def _read(self, tx: Tx, tenant_id: UUID, run_id: UUID, kept: Kept | None) -> Kept:
        head = await store.get_run(tx, tenant_id, run_id)
        if head is None:
            raise NotFound(f"there is no graph run {run_id}")
        is_same = kept is not None and not head.is_expired
        plan = kept.plan if kept and is_same else restored_plan(head.snapshot)
        run = restored(plan, head.run, await store.records_of(tx, head))
        return Kept(head, plan, run, head.revision)

    def keep(self, kept: Kept) -> None:
        self.drop(kept.head.id)
        self._kept[kept.head.id] = kept
        self._records += len(kept.run.records)
        while len(self._kept) > 1 and (
            len(self._kept) > RUNS_KEPT_MAX or self._records > RECORDS_KEPT_MAX
        ):
            _, oldest = self._kept.popitem(last=False)
            self._records -= len(oldest.run.records)

    def not_below(self, run: Run, found: Progress) -> Progress:
        """Never less than was told before, while it goes on: lists grow, and jobs begin anew."""
        if run.status.is_over:
            self._told.pop(run.id, None)
            return found
        before = self._told.pop(run.id, (0.0, 0.0))
        told = (
            max(found.overall_percent, before[0]),
            max(found.weighted_percent, before[1]),
        )
        self._told[run.id] = told
        while len(self._told) > RUNS_KEPT_MAX:
            self._told.popitem(last=False)
        return found._replace(overall_percent=told[0], weighted_percent=told[1])

    def drop(self, run_id: UUID) -> None:
        old = self._kept.pop(run_id, None)
        if old:
            self._records -= len(old.run.records)
