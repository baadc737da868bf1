"""Creates reports for users: the timeline of a run and the comparison of two runs."""

from functools import partial
from itertools import islice
from uuid import UUID

from comfyfleet.api.graph_reports import RunComparison, RunTimeline
from comfyfleet.server.graphs.actions import Owner, file_ids_in, get_live_run
from comfyfleet.server.graphs.apply import GraphContext, large_runs
from comfyfleet.server.graphs.compare import RunFacts, compare_runs
from comfyfleet.server.graphs.timeline import timeline_of
from comfyfleet.server.media.service import FILES_AT_ONCE_MAX, find_existing

# Maximum number of files that are compared by content. Other files are compared by id.
FILES_COMPARED_MAX = 20_000


async def read_timeline(graphs: GraphContext, owner: Owner, run_id: UUID) -> RunTimeline:
    return (await _read_facts(graphs, owner, run_id)).timeline


async def compare_own_runs(
    graphs: GraphContext, owner: Owner, a: UUID, b: UUID, *, with_same: bool
) -> RunComparison:
    """Compares two of the user's runs. Raises NotFound for runs of other users."""
    one, two = await _read_facts(graphs, owner, a), await _read_facts(graphs, owner, b)
    hashes = await _content_hashes(graphs, owner, (one, two))
    work = partial(compare_runs, one, two, hashes, with_same=with_same)
    return await large_runs.run(owner.user_id, work)


async def _read_facts(graphs: GraphContext, owner: Owner, run_id: UUID) -> RunFacts:
    loaded, run = await get_live_run(graphs, owner, run_id)
    head = loaded.head
    # This runs in a thread, because a run may have many thousands of executions.
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
    """Returns the content hashes of the runs' input and output files. Files of other users are left
    out, because the values of a run may contain any file id."""
    values = [value for run in facts for value in (run.head.inputs, run.run.outputs or {})]
    named = islice(dict.fromkeys(file_ids_in(values)), FILES_COMPARED_MAX)
    file_ids = [file_id for file_id in map(_id_or_none, named) if file_id is not None]
    hashes: dict[str, str] = {}
    for start in range(0, len(file_ids), FILES_AT_ONCE_MAX):
        part = file_ids[start : start + FILES_AT_ONCE_MAX]
        async with graphs.context.tenant(owner.tenant_id) as tx:
            files = await find_existing(tx, owner.tenant_id, part)
        for file in files.values():
            if file.user_id == owner.user_id and file.content_hash:
                hashes[str(file.id)] = file.content_hash
    return hashes


def _id_or_none(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
