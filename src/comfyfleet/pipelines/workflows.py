"""The registered workflows that a pipeline's steps name."""

from comfyfleet.db import Tx
from comfyfleet.effects import service as effects
from comfyfleet.graphs.catalogue import Catalogue, WorkflowFacts, catalogue_of, facts_of
from comfyfleet.kernel.errors import NotFound
from comfyfleet.pipelines.model import Pipeline


async def catalogue_for(tx: Tx, pipeline: Pipeline) -> Catalogue:
    """Those that are there and take jobs; what is missing is not in it."""
    wanted = {(step.workflow, step.version) for step in pipeline.steps}
    found = [await _facts(tx, slug, version) for slug, version in wanted]
    return catalogue_of(tuple(facts for facts in found if facts))


async def _facts(tx: Tx, slug: str, version: int | None) -> WorkflowFacts | None:
    try:
        workflow = await effects.by_slug(tx, slug)
        if workflow.is_open or not workflow.is_active:
            return None
        return facts_of(workflow, await effects.get_version(tx, workflow, version))
    except NotFound:
        return None


async def facts_by_step(tx: Tx, pipeline: Pipeline) -> dict[int, WorkflowFacts]:
    catalogue = await catalogue_for(tx, pipeline)
    found = {
        number: catalogue.find(step.workflow, step.version)
        for number, step in enumerate(pipeline.steps)
    }
    return {number: facts for number, facts in found.items() if facts}
