"""Starts a rerun, which reuses results of an earlier run. It starts at a specified node, or runs
only the nodes whose results are missing or outdated.

A single transaction writes the new run with the reused results. It also locks the earlier run and
the result files. The jobs are started afterwards, as in any other run."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID, uuid5

from comfyfleet.api.graph_model import InputNode
from comfyfleet.api.graph_parse import write_graph
from comfyfleet.errors import Conflict
from comfyfleet.server.graphs import store
from comfyfleet.server.graphs.actions import (
    CheckedDocument,
    Owner,
    advance_new,
    check_document,
    file_ids_in,
    find_run,
    get_graph,
    get_run,
    replace_files,
    require_payable,
)
from comfyfleet.server.graphs.apply import (
    GraphContext,
    LoadedRun,
    count_end,
    large_runs,
    write_decision,
)
from comfyfleet.server.graphs.decide import deadline_from, decide_rerun, new_run
from comfyfleet.server.graphs.document_work import check_size, compute
from comfyfleet.server.graphs.draft import RerunDecision
from comfyfleet.server.graphs.plan import RunPlan, raise_problems
from comfyfleet.server.graphs.rerun import (
    EarlierRun,
    RerunFrom,
    changed_nodes,
    files_made,
    inputs_read,
    least_tokens,
    require_node,
    with_properties,
)
from comfyfleet.server.graphs.run import ExecutionKey, GraphRunState, GraphRunStatus, RunRow
from comfyfleet.server.graphs.snapshot import dump_plan
from comfyfleet.server.graphs.validate import check_inputs
from comfyfleet.server.jobs import reuse
from comfyfleet.server.jobs.idempotency import key_conflict
from comfyfleet.server.media import service as media

TRIES_MAX = 5
NODES_NAMED_MAX = 5


@dataclass(frozen=True, slots=True)
class NewRerun:
    start: str | None = None  # The node to run again, with all nodes after it.
    inputs: Mapping[str, Any] = field(default_factory=dict)  # The changed inputs.
    values: Mapping[str, Any] = field(default_factory=dict)  # Properties to set, by node.property.
    version: int | None = None  # None means that the graph of the earlier run is used.
    max_tokens: int | None = None
    idempotency_key: str | None = None

    @property
    def digest(self) -> str:
        """A hash of the request, which identifies repeated requests."""
        whole = (self.start, self.inputs, self.values, self.version, self.max_tokens)
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


class _PreparedRerun(NamedTuple):
    earlier: LoadedRun
    head: RunRow
    plan: RunPlan
    begun: RerunDecision
    needed: Mapping[UUID, str]  # The required files, each with its node or input.


async def rerun_graph_run(
    graphs: GraphContext, owner: Owner, run_id: UUID, wanted: NewRerun
) -> tuple[LoadedRun, bool]:
    """Starts a rerun. Returns it and whether it is new. A request with the same idempotency key
    returns the existing run."""
    check_size(wanted.inputs)
    check_size(wanted.values, "set")
    await get_run(graphs, owner, run_id)
    new_id = _rerun_id(graphs, owner, run_id, wanted.idempotency_key)
    if wanted.idempotency_key and (before := await find_run(graphs, owner, new_id)):
        return _require_same(before, wanted), False
    for _ in range(TRIES_MAX):
        earlier = await get_run(graphs, owner, run_id)
        prepared = await _prepare(graphs, owner, earlier, new_id, wanted)
        loaded = await _store(graphs, prepared)
        if loaded is None:
            continue  # Tries again, because the earlier run has changed.
        if loaded.revision:
            graphs.runs.keep(loaded)
            count_end(graphs, GraphRunStatus.PENDING, loaded.run.status)
            return await advance_new(graphs, owner, new_id), True
        # Another request with the same key was faster.
        return _require_same(await get_run(graphs, owner, new_id), wanted), False
    raise Conflict(f"other requests are changing graph run {run_id}; try again")


def _rerun_id(graphs: GraphContext, owner: Owner, run_id: UUID, key: str | None) -> UUID:
    if key is None:
        return graphs.context.new_id()
    return uuid5(run_id, f"rerun/{owner.tenant_id}/{owner.user_id}/{key}")


def _require_same(before: LoadedRun, wanted: NewRerun) -> LoadedRun:
    if not before.head.is_expired and (before.head.rerun or {}).get("digest") != wanted.digest:
        raise key_conflict()
    return before


async def _prepare(
    graphs: GraphContext, owner: Owner, earlier: LoadedRun, new_id: UUID, wanted: NewRerun
) -> _PreparedRerun:
    """Plans the rerun without storing it. Raises an error if the rerun can't start."""
    _require_ended(earlier)
    checked, version = await _checked(graphs, owner, earlier, wanted)
    inputs = _merged_inputs(checked, earlier, wanted)
    check_size(inputs)
    raise_problems([*checked.check.problems, *check_inputs(checked.check.graph, inputs)])
    plan = await compute(owner.tenant_id, checked.document, checked.plan)
    if wanted.start is not None:
        require_node(plan, wanted.start)
    inputs |= await replace_files(graphs, owner, plan.graph, wanted.inputs)
    run = _new_state(graphs, earlier, plan, new_id, inputs, wanted)
    begun = await _begin(graphs, owner, earlier, plan, run, wanted)
    now = graphs.context.clock()
    head = RunRow(
        id=new_id,
        tenant_id=owner.tenant_id,
        user_id=owner.user_id,
        graph_id=earlier.head.graph_id,
        graph_version=version,
        snapshot=await compute(owner.tenant_id, checked.document, partial(dump_plan, plan)),
        inputs=inputs,
        max_tokens=run.max_tokens,
        created_at=now,
        changed_at=now,
        deadline_at=run.deadline_at,
        rerun_of=earlier.head.id,
        rerun={
            "from": wanted.start,
            "inputs": sorted(wanted.inputs),
            "set": dict(wanted.values),
            "digest": wanted.digest,
        },
    )
    return _PreparedRerun(earlier, head, plan, begun, _files_needed(plan, begun, inputs))


def _require_ended(earlier: LoadedRun) -> None:
    if earlier.head.is_expired:
        raise Conflict("the run has expired, and its results were deleted")
    if not earlier.run.status.is_over:
        asks = earlier.run.status == GraphRunStatus.WAITING_FOR_USER
        remedy = "answer its question" if asks else "wait"
        raise Conflict(
            f"only a finished run can be rerun; this one is {earlier.run.status}, "
            f"so {remedy} or cancel it first"
        )


async def _checked(
    graphs: GraphContext, owner: Owner, earlier: LoadedRun, wanted: NewRerun
) -> tuple[CheckedDocument, int]:
    """Validates the graph again, because its workflows may have changed. Returns the validated
    graph and its version."""
    head = earlier.head
    if wanted.version is None:
        changed = with_properties(write_graph(earlier.plan.source), wanted.values)
        # Uses the subgraphs of the earlier run, even if their names now refer to other graphs.
        known = earlier.plan.library
        return await check_document(graphs, owner, changed, known=known), head.graph_version
    stored = await get_graph(graphs, owner, head.graph_id, wanted.version)
    changed = with_properties(stored.document, wanted.values)
    return await check_document(graphs, owner, changed), stored.version


def _merged_inputs(
    checked: CheckedDocument, earlier: LoadedRun, wanted: NewRerun
) -> dict[str, Any]:
    """Returns the inputs of the earlier run that still exist in the graph, combined with the new
    inputs."""
    nodes = checked.check.graph.nodes
    earlier_inputs = {
        name: value
        for name, value in earlier.head.inputs.items()
        if isinstance(nodes.get(name), InputNode)
    }
    return {**earlier_inputs, **wanted.inputs}


def _new_state(
    graphs: GraphContext,
    earlier: LoadedRun,
    plan: RunPlan,
    new_id: UUID,
    inputs: Mapping[str, Any],
    wanted: NewRerun,
) -> GraphRunState:
    """Returns the initial state of the rerun. Its spending limit is the requested one or, by
    default, that of the earlier run."""
    was = earlier.run.max_tokens
    own_limit = was if was != earlier.plan.graph.max_tokens else None
    run = new_run(plan, new_id, inputs, max_tokens=own_limit)
    if wanted.max_tokens is not None:
        run = replace(run, max_tokens=wanted.max_tokens)
    return replace(run, deadline_at=deadline_from(plan, graphs.context.clock()))


async def _begin(
    graphs: GraphContext,
    owner: Owner,
    earlier: LoadedRun,
    plan: RunPlan,
    run: GraphRunState,
    wanted: NewRerun,
) -> RerunDecision:
    before, after = RerunFrom(earlier.plan, earlier.run.inputs), RerunFrom(plan, run.inputs)
    changed = changed_nodes(before, after, start=wanted.start)
    environment = await graphs.environment.now(graphs.context, owner.tenant_id)
    source = EarlierRun(plan, earlier.plan, earlier.run, changed)
    # This runs in a thread, because the earlier run may have the results of ten thousand jobs.
    work = partial(decide_rerun, plan, run, source, environment)
    begun = await large_runs.run(owner.user_id, work)
    after_it = begun.decision.run
    if after_it.status.is_over and len(begun.unchanged) == len(after_it.records):
        raise Conflict(
            "all nodes already have results; specify the node to run from (--from NODE)",
            field="from",
        )
    await require_payable(graphs, owner, after_it, least_tokens(plan, after_it, begun.unchanged))
    return begun


def _files_needed(
    plan: RunPlan, begun: RerunDecision, inputs: Mapping[str, Any]
) -> dict[UUID, str]:
    """Returns the files that the rerun needs, each with the execution that produced it or the input
    that contains it."""
    run = begun.decision.run
    needed = {
        UUID(file_id): name
        for name in inputs_read(plan, run, begun.unchanged)
        for file_id in file_ids_in(inputs.get(name))
    }
    reused_keys: list[ExecutionKey] = [key for key in begun.unchanged if key.node in plan.workflows]
    return needed | {
        file_id: str(key) for key in reused_keys for file_id in files_made(run.record(key))
    }


async def _store(graphs: GraphContext, prepared: _PreparedRerun) -> LoadedRun | None:
    """Writes the rerun with the results that it reuses. Returns None if the earlier run has
    changed, and a run with revision 0 if the rerun already exists."""
    context, head = graphs.context, prepared.head
    kept_since = await reuse.files_kept_since(context, head.tenant_id)
    first = LoadedRun(
        head,
        prepared.plan,
        GraphRunState(head.id, head.inputs, head.max_tokens, deadline_at=head.deadline_at),
        0,
    )
    async with context.tenant_transaction(head.tenant_id) as tx:
        revision = await store.lock_revision(tx, head.tenant_id, prepared.earlier.head.id)
        if revision != prepared.earlier.revision:
            return None
        if not await store.add_run(tx, head):
            return first
        locked = await media.lock_kept(
            tx, head.tenant_id, head.user_id, list(prepared.needed), since=kept_since
        )
        _require_files(prepared, set(locked))
        await media.keep_longer(tx, head.tenant_id, locked, now=context.clock())
        return await write_decision(graphs, tx, first, prepared.begun.decision)


def _require_files(prepared: _PreparedRerun, available: set[UUID]) -> None:
    lost = sorted({name for file_id, name in prepared.needed.items() if file_id not in available})
    if not lost:
        return
    named = ", ".join(lost[:NODES_NAMED_MAX]) + (" and others" if lost[NODES_NAMED_MAX:] else "")
    raise Conflict(
        f"files of {named} have expired or were deleted; rerun from there or from an earlier node",
        nodes=lost[:NODES_NAMED_MAX],
        field="from",
    )
