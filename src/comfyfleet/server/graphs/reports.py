"""What users read about runs: the timeline of one, the comparison of two."""

from functools import partial
from itertools import islice
from uuid import UUID

from comfyfleet.api.graph_reports import RunComparison, RunTimeline
from comfyfleet.server.graphs.actions import Owner, file_ids_in, get_live_run
from comfyfleet.server.graphs.apply import GraphContext, large_runs
from comfyfleet.server.graphs.compare import RunFacts, compare_runs
from comfyfleet.server.graphs.timeline import timeline_of
from comfyfleet.server.media.service import FILES_AT_ONCE_MAX, find_existing

FILES_COMPARED_MAX = 20_000  # of both runs, by their content; the rest by id


async def read_timeline(graphs: GraphContext, owner: Owner, run_id: UUID) -> RunTimeline:
    return (await _read_facts(graphs, owner, run_id)).timeline


async def compare_own_runs(
    graphs: GraphContext, owner: Owner, a: UUID, b: UUID, *, with_same: bool
) -> RunComparison:
    """Compares two runs of a user; raises NotFound for any other."""
    one, two = await _read_facts(graphs, owner, a), await _read_facts(graphs, owner, b)
    hashes = await _content_hashes(graphs, owner, (one, two))
    work = partial(compare_runs, one, two, hashes, with_same=with_same)
    return await large_runs.run(owner.user_id, work)


async def _read_facts(graphs: GraphContext, owner: Owner, run_id: UUID) -> RunFacts:
    loaded, run = await get_live_run(graphs, owner, run_id)
    head = loaded.head
    # In a thread: a run may have many thousands of executions.
    work = partial(
        timeline_of,
        loaded.plan,
        run,
        started_at=head.created_at,
        ended_at=head.ended_at,
        now=graphs.context.clock(),
    )
    timeline = await large_runs.run(owner.user_id, work)
    return RunFacts(head, loaded.plan, run, timeline)


async def _content_hashes(
    graphs: GraphContext, owner: Owner, facts: tuple[RunFacts, ...]
) -> dict[str, str]:
    """Returns the content hashes of the files that went into the runs and came out, if they are the
    user's own: values of a run may name any id.
    """
    values = [value for each in facts for value in (each.head.inputs, each.run.outputs or {})]
    named = islice(dict.fromkeys(file_ids_in(values)), FILES_COMPARED_MAX)
    wanted = [each for each in map(_id_or_none, named) if each is not None]
    found: dict[str, str] = {}
    for start in range(0, len(wanted), FILES_AT_ONCE_MAX):
        part = wanted[start : start + FILES_AT_ONCE_MAX]
        async with graphs.context.tenant(owner.tenant_id) as tx:
            files = await find_existing(tx, owner.tenant_id, part)
        for each in files.values():
            if each.user_id == owner.user_id and each.content_hash:
                found[str(each.id)] = each.content_hash
    return found


def _id_or_none(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
