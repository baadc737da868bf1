"""Workflows are given to fleets that can run them, as far as anybody knows."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from comfyfleet.db import Tx
from comfyfleet.effects import service as effects
from comfyfleet.effects.model import Version, Workflow
from comfyfleet.effects.models import missing_on
from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.model import Assignment, Fleet, Worker
from comfyfleet.fleets.offers import Missing
from comfyfleet.kernel.errors import Refused
from comfyfleet.wire.messages import BackendFacts

UNABLE_NAMED_MAX = 5
NOTHING_TOLD = BackendFacts()


@dataclass(frozen=True, slots=True)
class Lack:
    """What keeps one worker from running a workflow; nothing: it can."""

    missing: Missing = field(default_factory=Missing)
    capabilities: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.capabilities)

    @property
    def size(self) -> int:
        return len(self.missing.node_types) + len(self.missing.models) + len(self.capabilities)

    def in_words(self) -> str:
        named = [f"capability {name}" for name in self.capabilities]
        return ", ".join(filter(None, [self.missing.in_words(), *named]))

    def as_json(self) -> dict[str, list[str]]:
        return {
            "node_types": list(self.missing.node_types),
            "models": [each.file for each in self.missing.models],
            "capabilities": list(self.capabilities),
        }


async def assign(
    tx: Tx, fleet: Fleet, slugs: Collection[str], *, now: datetime
) -> tuple[Assignment, list[str]]:
    """These workflows and no others; also says what could not be checked, and who can't run what.

    Refused if none of the workers that have told what they have can run a workflow that is new here.
    """
    wanted = await fleets.workflow_ids(tx, slugs)
    before = {each.slug for each in await fleets.assigned_to(tx, fleet)}
    warnings = []
    for slug in sorted(wanted.keys() - before):
        lacks = await lacks_of(tx, fleet, await effects.by_slug(tx, slug))
        if not lacks:
            warnings.append(
                f"No worker of {fleet.name} has told what its backend has: nobody knows whether "
                f"{slug} can be run there."
            )
        elif all(lacks.values()):
            raise _nobody_can(slug, fleet, lacks)
        elif any(lacks.values()):
            warnings.append(_some_can(slug, fleet, lacks))
    return await fleets.assign(tx, fleet, set(wanted.values()), now=now), warnings


async def lacks_of(
    tx: Tx, fleet: Fleet, workflow: Workflow, version: Version | None = None
) -> dict[str, Lack]:
    """By worker, of those of the fleet that serve the workflow and of which something is known."""
    workers = [
        worker
        for worker in await fleets.workers_of(tx, fleet)
        if worker.workflow_ids is None or workflow.id in worker.workflow_ids
    ]
    if workflow.is_open or not workers:
        return {}
    if version is None:
        version = await effects.get_version(tx, workflow)
    return lacks(workflow, version, workers, await fleets.facts_of(tx, workers))


def lacks(
    workflow: Workflow,
    version: Version,
    workers: Iterable[Worker],
    facts: Mapping[str, BackendFacts],
) -> dict[str, Lack]:
    """Capabilities are known of every worker; what its backend has, of those that have told it."""
    found = {
        worker.worker_id: Lack(
            missing_on(version, facts.get(worker.worker_id, NOTHING_TOLD)),
            tuple(sorted(workflow.required_capabilities - worker.capabilities)),
        )
        for worker in workers
    }
    return {name: lack for name, lack in found.items() if lack or name in facts}


async def doubts(tx: Tx, workflow: Workflow, version: Version) -> list[str]:
    """Where a workflow is assigned and somebody, or nobody, can't run this version of it."""
    found = []
    for fleet in await fleets.fleets_with(tx, workflow.id):
        known = await lacks_of(tx, fleet, workflow, version)
        if known and all(known.values()):
            found.append(
                f"No worker of {fleet.name} can run version {version.version}: it lacks "
                f"{least(known.values()).in_words()}."
            )
        elif any(known.values()):
            found.append(_some_can(workflow.slug, fleet, known))
    return found


def _some_can(slug: str, fleet: Fleet, lacks: Mapping[str, Lack]) -> str:
    unable = {name: lack for name, lack in sorted(lacks.items()) if lack}
    some = [f"{name} lacks {lack.in_words()}" for name, lack in unable.items()][:UNABLE_NAMED_MAX]
    more = f"; and {len(unable) - len(some)} more" if len(unable) > len(some) else ""
    return (
        f"{len(unable)} of {len(lacks)} workers of {fleet.name} can't run {slug} as it is "
        f"registered: {'; '.join(some)}{more}."
    )


def least(lacks: Iterable[Lack]) -> Lack:
    return min(lacks, key=lambda lack: lack.size)


def _nobody_can(slug: str, fleet: Fleet, lacks: Mapping[str, Lack]) -> Refused:
    nearest = least(lacks.values())
    workers: Sequence[str] = sorted(lacks)
    return Refused(
        f"none of the {len(workers)} workers of {fleet.name} can run {slug}: missing "
        f"{nearest.in_words()}",
        workflow=slug,
        missing=nearest.as_json(),
        workers={worker_id: lacks[worker_id].as_json() for worker_id in workers},
    )
