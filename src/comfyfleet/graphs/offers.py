"""What customers may use in graphs and pipelines: published effects, and workflows with a price."""

from collections.abc import Iterable
from dataclasses import replace

from comfyfleet.db import Tx
from comfyfleet.dispatch import service as dispatch
from comfyfleet.effects import service as effects
from comfyfleet.effects.catalogue import service as catalogue
from comfyfleet.effects.model import Workflow
from comfyfleet.graphs.catalogue import (
    Catalogue,
    Named,
    WorkflowFacts,
    catalogue_of,
    facts_of,
    facts_of_effect,
)
from comfyfleet.kernel.errors import NotFound

OFFERS_MAX = 500


async def offered(tx: Tx, named: Iterable[Named]) -> Catalogue:
    """As much of it as is named; what is not offered is left out, as is what isn't there."""
    wanted = {(each.effect, each.workflow if each.effect is None else "") for each in named}
    facts: list[WorkflowFacts] = []
    for effect, workflow in sorted(wanted, key=str):
        facts += await (_of_workflow(tx, workflow) if effect is None else _of_effect(tx, effect))
    return catalogue_of(tuple(facts))


async def with_names(tx: Tx, found: Catalogue) -> Catalogue:
    """With all names that are offered, for the complaints about others."""
    return replace(
        found,
        workflow_names=tuple(await effects.offered_slugs(tx)),
        effect_names=tuple(await catalogue.open_slugs(tx)),
    )


async def all_offered(tx: Tx) -> list[WorkflowFacts]:
    """Effects and workflows, by name; of each what a job gets if no version is named."""
    found = [facts_of_effect(each) for each in await catalogue.catalogue(tx, limit=OFFERS_MAX)]
    slugs = (await effects.offered_slugs(tx))[:OFFERS_MAX]
    for slug in slugs:
        found += [each for each in await _of_workflow(tx, slug) if each.is_current]
    return found


async def _of_workflow(tx: Tx, slug: str) -> list[WorkflowFacts]:
    try:
        workflow = await effects.by_slug(tx, slug)
    except NotFound:
        return []
    return await versions_offered(tx, workflow) if workflow.is_offered else []


async def versions_offered(tx: Tx, workflow: Workflow) -> list[WorkflowFacts]:
    seconds = await dispatch.typical_seconds(tx, workflow.id)
    return [
        facts_of(workflow, version, typical_seconds=seconds)
        for version in await effects.versions_of(tx, workflow)
    ]


async def _of_effect(tx: Tx, slug: str) -> list[WorkflowFacts]:
    offer = await catalogue.open_offer(tx, slug)
    if offer is None:
        return []
    seconds = await dispatch.typical_seconds(tx, offer.workflow.id)
    return [facts_of_effect(offer, typical_seconds=seconds)]
