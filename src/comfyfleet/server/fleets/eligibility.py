"""Determines which workers can run which workflows, from backend offers and the requirements of
workflow versions. The results are cached.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from datetime import datetime
from typing import Generic, TypeVar

from comfyfleet.server.db import Tx
from comfyfleet.server.fleets import store
from comfyfleet.server.fleets.model import (
    AssignedWorkflow,
    BackendOffer,
    FleetWorker,
    MissingRequirements,
    WorkflowRequirements,
    backend_offer,
    refusals_in,
    requirements_of,
)

Value = TypeVar("Value")
OFFERS_KEPT_MAX = 1_000
NEEDS_KEPT_MAX = 10_000
RESULTS_KEPT_MAX = 100_000


class EligibilityCache:
    """Caches backend offers, workflow requirements, and the requirements that backends lack.
    Entries never become outdated, because their keys contain hashes and versions.
    """

    def __init__(self) -> None:
        self._offers: _BoundedCache[BackendOffer] = _BoundedCache(OFFERS_KEPT_MAX)
        self._needs: _BoundedCache[WorkflowRequirements] = _BoundedCache(NEEDS_KEPT_MAX)
        self._lacks: _BoundedCache[MissingRequirements] = _BoundedCache(RESULTS_KEPT_MAX)

    async def offer(self, tx: Tx, worker: FleetWorker, *, now: datetime) -> BackendOffer | None:
        """Returns the offer of a worker's backend. None means that it is unknown. In that case, the
        backend counts as able to run all workflows.
        """
        return (await self.offers(tx, [worker], now=now)).get(worker.worker_id)

    async def offers(
        self, tx: Tx, workers: Iterable[FleetWorker], *, now: datetime
    ) -> dict[str, BackendOffer]:
        """Returns backend offers by worker id. Workers that have reported no facts are left out."""
        offers: dict[str, BackendOffer] = {}
        unread: dict[str, list[FleetWorker]] = {}
        for worker in workers:
            key = _offer_key(worker, now)
            if key and (cached := self._offers.get(key)):
                offers[worker.worker_id] = cached
            elif key:
                unread.setdefault(key, []).append(worker)
        firsts = [group[0] for group in unread.values()]
        facts = await store.backend_facts_of(tx, [first.id for first in firsts]) if firsts else {}
        for key, group in unread.items():
            # Lets other tasks run, because a backend may have a hundred thousand model files.
            await asyncio.sleep(0)
            refusals = refusals_in(group[0].refusals, now)
            offer = backend_offer(facts.get(group[0].worker_id), refusals, key)
            self._offers.keep(key, offer)
            offers |= {worker.worker_id: offer for worker in group}
        return offers

    async def able(
        self, tx: Tx, offer: BackendOffer | None, workflows: Sequence[AssignedWorkflow]
    ) -> list[AssignedWorkflow]:
        """Returns the workflows that a backend can run."""
        if offer is None:
            return list(workflows)
        await self._read_needs(tx, workflows)
        return [workflow for workflow in workflows if not self._missing(offer, workflow)]

    def _missing(self, offer: BackendOffer, workflow: AssignedWorkflow) -> MissingRequirements:
        key = (offer.key, workflow.workflow_id, workflow.version)
        missing = self._lacks.get(key)
        if missing is None:
            needs = self._needs.get(key[1:]) or WorkflowRequirements()
            missing = self._lacks.keep(key, offer.lacks(needs.node_types, needs.models))
        return missing

    async def _read_needs(self, tx: Tx, workflows: Iterable[AssignedWorkflow]) -> None:
        unread = [
            key
            for workflow in workflows
            if self._needs.get(key := (workflow.workflow_id, workflow.version)) is None
        ]
        if not unread:
            return
        rows = await store.needs_of_versions(tx, unread)
        for key in unread:
            row = rows.get(key)
            self._needs.keep(key, WorkflowRequirements() if row is None else requirements_of(*row))


def _offer_key(worker: FleetWorker, now: datetime) -> str | None:
    refusals = refusals_in(worker.refusals, now)
    if not refusals:
        return worker.facts_hash
    content = json.dumps([sorted(refusals.node_types), sorted(refusals.models)])
    return f"{worker.facts_hash} {hashlib.sha256(content.encode()).hexdigest()}"


class _BoundedCache(Generic[Value]):
    """A cache that drops its oldest entries when it is full. Entries don't expire."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable) -> Value | None:
        return self._values.get(key)

    def keep(self, key: Hashable, value: Value) -> Value:
        self._values[key] = value
        if len(self._values) > self._most:
            self._values.popitem(last=False)
        return value
