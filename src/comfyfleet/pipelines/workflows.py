"""The effects and workflows that a pipeline's steps name."""

from comfyfleet.db import Tx
from comfyfleet.graphs.catalogue import WorkflowFacts
from comfyfleet.graphs.offers import offered
from comfyfleet.pipelines.model import Pipeline


async def facts_by_step(tx: Tx, pipeline: Pipeline) -> dict[int, WorkflowFacts]:
    """Of those that are offered; what is not, or not any more, is left out."""
    catalogue = await offered(tx, pipeline.steps)
    found = {number: catalogue.facts_for(step) for number, step in enumerate(pipeline.steps)}
    return {number: facts for number, facts in found.items() if facts}
