"""Actions with which users and operators pause and resume graph runs."""

from uuid import UUID

from comfyfleet.server.graphs.actions import Owner, advance_new, get_run
from comfyfleet.server.graphs.apply import GraphContext, LoadedRun, apply_decision
from comfyfleet.server.graphs.decide import decide_pause, decide_resume
from comfyfleet.server.graphs.draft import RunDecision
from comfyfleet.server.graphs.run import Environment


async def pause_graph_run(graphs: GraphContext, owner: Owner, run_id: UUID) -> LoadedRun:
    """Pauses a run. Its submitted jobs continue."""
    await get_run(graphs, owner, run_id)

    async def decide(loaded: LoadedRun, environment: Environment) -> RunDecision:
        return decide_pause(loaded.run, environment)

    return await apply_decision(graphs, owner.tenant_id, run_id, decide)


async def resume_graph_run(graphs: GraphContext, owner: Owner, run_id: UUID) -> LoadedRun:
    await get_run(graphs, owner, run_id)

    async def decide(loaded: LoadedRun, environment: Environment) -> RunDecision:
        return decide_resume(loaded.run, environment)

    await apply_decision(graphs, owner.tenant_id, run_id, decide)
    return await advance_new(graphs, owner, run_id)
