"""Keeps a fleet of our own assigned to all that its backends can run, also what is registered later."""

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta

from comfyfleet.audit import service as audit
from comfyfleet.db import Tx
from comfyfleet.effects import service as effects
from comfyfleet.effects.assigning import lacks, least
from comfyfleet.effects.model import Workflow
from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.model import Fleet, Worker
from comfyfleet.plane import Plane
from comfyfleet.wire.messages import BackendFacts

logger = logging.getLogger(__name__)


class Assigning:
    """A sweep. It only adds: what an operator has assigned by hand stays."""

    def __init__(self, plane: Plane, slug: str, stage: str) -> None:
        self._plane = plane
        self._slug = slug
        self._stage = stage
        self._looked_at: object = None

    async def __call__(self) -> None:
        plane = self._plane
        async with plane.central.look() as tx:
            fleet = await fleets.get(tx, self._slug, self._stage)
            workers = await self._workers(tx, fleet)
            facts = await fleets.facts_of(tx, workers)
            workflows = [each for each in await effects.all_of(tx) if each.is_active]
            situation = _situation(workflows, workers)
            if not facts or situation == self._looked_at:
                return
            runnable = [each for each in workflows if await _can_run(tx, each, workers, facts)]
            assigned = {each.workflow_id for each in await fleets.assigned_to(tx, fleet)}
        wanted = assigned | {each.id for each in runnable}
        if wanted != assigned:
            await self._assign(wanted, [each.slug for each in runnable if each.id not in assigned])
        self._looked_at = situation

    async def _workers(self, tx: Tx, fleet: Fleet) -> list[Worker]:
        """Of those that are there now, one of each kind: there may be thousands, every second."""
        plane = self._plane
        seen_since = plane.clock() - timedelta(seconds=plane.settings.offline_after_seconds)
        return await fleets.one_of_each_kind(tx, fleet, seen_since=seen_since)

    async def _assign(self, workflow_ids: set[int], new: Sequence[str]) -> None:
        plane, now = self._plane, self._plane.clock()
        async with plane.central.begin() as tx:
            fleet = await fleets.get(tx, self._slug, self._stage)
            await fleets.assign(tx, fleet, workflow_ids, now=now)
            await audit.record(
                tx,
                actor="system",
                action="assign",
                subject=fleet.subject,
                now=now,
                details={"workflows_added": list(new)},
            )
        # Those who wait ask anew, as workers that may run more.
        plane.queue.order()
        logger.info("fleet %s now runs %s", fleet.name, ", ".join(new))


async def _can_run(
    tx: Tx, workflow: Workflow, workers: Sequence[Worker], facts: Mapping[str, BackendFacts]
) -> bool:
    """One of them is enough: only those that can run a job get it."""
    version = await effects.get_version(tx, workflow)
    known = lacks(workflow, version, workers, facts)
    if all(known.values()):
        logger.warning(
            "workflow %s is not assigned: it lacks %s",
            workflow.slug,
            least(known.values()).in_words(),
        )
        return False
    return True


def _situation(workflows: Sequence[Workflow], workers: Sequence[Worker]) -> object:
    """While it is the same, there is nothing to do."""
    return (
        frozenset((each.id, each.version, each.required_capabilities) for each in workflows),
        frozenset((each.worker_id, each.facts_hash, each.capabilities) for each in workers),
    )
