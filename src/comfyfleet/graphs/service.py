"""What people may do with graphs: keep them, ask what they cost, run, stop, retry, answer."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID, uuid5

from comfyfleet.db import Tx
from comfyfleet.files import service as files
from comfyfleet.files.model import File
from comfyfleet.graphs import store
from comfyfleet.graphs.advancing import Graphs, change
from comfyfleet.graphs.catalogue import Catalogue
from comfyfleet.graphs.decide import cancel_run, new_run, next_actions, retry_run
from comfyfleet.graphs.documents import read_document
from comfyfleet.graphs.draft import Advance
from comfyfleet.graphs.events import Answer, Surroundings
from comfyfleet.graphs.going import advance, as_of_now
from comfyfleet.graphs.hearing import reference
from comfyfleet.graphs.keeping import Kept
from comfyfleet.graphs.model import Graph, InputNode, Problem
from comfyfleet.graphs.parsing import parse_graph
from comfyfleet.graphs.placing import alternatives, is_online, is_ours, nobody
from comfyfleet.graphs.plan import Plan, plan_of, refuse
from comfyfleet.graphs.ports import MEDIA, type_named
from comfyfleet.graphs.quote import Quote, quote
from comfyfleet.graphs.runs import Choice, Key, Run, RunStatus, Status
from comfyfleet.graphs.snapshot import saved_plan
from comfyfleet.graphs.stored import Head, StoredGraph
from comfyfleet.graphs.validation import Checked, check, check_inputs
from comfyfleet.graphs.world import catalogue_for
from comfyfleet.graphs.writing import document_of
from comfyfleet.jobs.arrival import REFUSALS, arrived
from comfyfleet.kernel.errors import (
    Conflict,
    Forbidden,
    InsufficientTokens,
    InvalidInput,
    NotFound,
    QueueFull,
    Unavailable,
)
from comfyfleet.ledger import service as ledger
from comfyfleet.media import service as media

FILES_GIVEN_MAX = 10_000
SAME_NAME_MAX = 50  # graphs of one name that a new one is compared with


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose graphs: the tenant's; whose runs: the user's."""

    tenant_id: UUID
    user_id: UUID


async def document_from(text: str | Mapping[str, Any]) -> Any:
    """JSON and YAML come as text, read in a thread; JSON may come as what it means."""
    return await asyncio.to_thread(read_document, text) if isinstance(text, str) else text


async def checked(graphs: Graphs, document: Any) -> tuple[Checked, Catalogue]:
    parsed = parse_graph(document)
    async with graphs.sides.central.look() as tx:
        catalogue = await catalogue_for(tx, parsed.graph, graphs.sides)
    return check(document, catalogue), catalogue


async def _sound(graphs: Graphs, document: Any) -> Graph:
    found, _ = await checked(graphs, document)
    refuse(list(found.problems))
    return found.graph


async def create(graphs: Graphs, owner: Owner, document: Any) -> StoredGraph:
    """What the user has stored under that name already, and with that content, is not stored again."""
    made, _ = await stored_once(graphs, owner, document)
    return made


async def stored_once(graphs: Graphs, owner: Owner, document: Any) -> tuple[StoredGraph, bool]:
    """The graph, and whether it is new."""
    graph = await _sound(graphs, document)
    sides = graphs.sides
    if same := await _same_graph(graphs, owner, graph):
        return same, False
    made = StoredGraph(
        sides.new_id(),
        owner.tenant_id,
        owner.user_id,
        graph.name,
        1,
        document_of(graph),
        sides.clock(),
    )
    pool = await sides.pool_of(owner.tenant_id)
    async with pool.begin() as tx:
        await store.add_graph(tx, made)
    return made, True


async def _same_graph(graphs: Graphs, owner: Owner, graph: Graph) -> StoredGraph | None:
    pool = await graphs.sides.pool_of(owner.tenant_id)
    async with pool.look() as tx:
        found = await store.graphs_named(
            tx, owner.tenant_id, graph.name, user_id=owner.user_id, limit=SAME_NAME_MAX
        )
    document = document_of(graph)
    return next((each for each in found if dict(each.document) == document), None)


async def named(graphs: Graphs, owner: Owner, text: str) -> UUID:
    """A graph by its id, or by its name: the user's own before the tenant's, the newest first."""
    try:
        return UUID(text)
    except ValueError:
        pass
    pool = await graphs.sides.pool_of(owner.tenant_id)
    async with pool.look() as tx:
        found = await store.graphs_named(
            tx, owner.tenant_id, text, user_id=owner.user_id, limit=1
        ) or await store.graphs_named(tx, owner.tenant_id, text, limit=1)
    if not found:
        raise NotFound(f"there is no graph {text!r:.100}")
    return found[0].id


async def delete(graphs: Graphs, owner: Owner, graph_id: UUID) -> None:
    """Runs that go on end as they would have."""
    _require_own(await get(graphs, owner, graph_id), owner)
    pool = await graphs.sides.pool_of(owner.tenant_id)
    async with pool.begin() as tx:
        await store.delete_graph(tx, owner.tenant_id, graph_id, now=graphs.sides.clock())


def _require_own(graph: StoredGraph, owner: Owner) -> None:
    """Colleagues run each other's graphs, and pay for that: only who made one changes it."""
    if graph.user_id != owner.user_id:
        raise Forbidden("only who made this graph may change it; store one of your own")


async def new_version(graphs: Graphs, owner: Owner, graph_id: UUID, document: Any) -> StoredGraph:
    """Runs that go on keep theirs."""
    _require_own(await get(graphs, owner, graph_id), owner)
    graph = await _sound(graphs, document)
    pool = await graphs.sides.pool_of(owner.tenant_id)
    async with pool.begin() as tx:
        version = await store.next_version(tx, owner.tenant_id, graph_id, graph.name)
        if version is None:
            raise NotFound(f"there is no graph {graph_id}")
        made = StoredGraph(
            graph_id,
            owner.tenant_id,
            owner.user_id,
            graph.name,
            version,
            document_of(graph),
            graphs.sides.clock(),
        )
        await store.add_version(tx, made)
    return made


async def get(
    graphs: Graphs, owner: Owner, graph_id: UUID, version: int | None = None
) -> StoredGraph:
    pool = await graphs.sides.pool_of(owner.tenant_id)
    async with pool.look() as tx:
        found = await store.get_graph(tx, owner.tenant_id, graph_id, version)
    if found is None:
        which = "" if version is None else f" with a version {version}"
        raise NotFound(f"there is no graph {graph_id}{which}")
    return found


async def _planned(graphs: Graphs, document: Mapping[str, Any], inputs: Mapping[str, Any]) -> Plan:
    """The graph as it can be run now; its workflows may have changed since it was stored."""
    found, catalogue = await checked(graphs, dict(document))
    refuse([*found.problems, *check_inputs(found.graph, inputs)])
    return plan_of(found.graph, catalogue)


async def quoted(
    graphs: Graphs,
    owner: Owner,
    graph_id: UUID,
    inputs: Mapping[str, Any],
    *,
    version: int | None = None,
) -> Quote:
    """Inputs may be left out: then lists are as long as they may be."""
    stored = await get(graphs, owner, graph_id, version)
    found, catalogue = await checked(graphs, dict(stored.document))
    refuse(list(found.problems))
    plan = plan_of(found.graph, catalogue)
    online = sum(each.is_online for each in catalogue.backends)
    most = graphs.sides.settings.max_queued_per_graph_run
    priced = quote(plan, inputs, side_by_side=min(online, most))
    return replace(priced, warnings=found.warnings)


# Runs


@dataclass(frozen=True, slots=True)
class NewRun:
    inputs: Mapping[str, Any]
    version: int | None = None
    max_tokens: int | None = None
    idempotency_key: str | None = None


async def start(graphs: Graphs, owner: Owner, graph_id: UUID, wanted: NewRun) -> tuple[Kept, bool]:
    """The run, and whether it is new: the same idempotency key gives the same run."""
    run_id = _run_id(graphs, owner, graph_id, wanted.idempotency_key)
    if wanted.idempotency_key and (before := await _find(graphs, owner, run_id)):
        await _require_same(graphs, owner, before, wanted)
        return before, False
    stored = await get(graphs, owner, graph_id, wanted.version)
    plan, run = await _startable(graphs, owner, stored.document, run_id, wanted)
    head = Head(
        id=run_id,
        tenant_id=owner.tenant_id,
        user_id=owner.user_id,
        graph_id=graph_id,
        graph_version=stored.version,
        snapshot=saved_plan(plan),
        inputs={**run.inputs},
        max_tokens=run.max_tokens,
        created_at=graphs.sides.clock(),
        changed_at=graphs.sides.clock(),
    )
    pool = await graphs.sides.pool_of(owner.tenant_id)
    async with pool.begin() as tx:
        is_new = await store.add_run(tx, head)
    if is_new:
        graphs.runs.keep(Kept(head, plan, run, 0))
    else:  # somebody else was quicker with the same key
        await _require_same(graphs, owner, await get_run(graphs, owner, run_id), wanted)
    return await _begun(graphs, owner, run_id), is_new


async def run_document(
    graphs: Graphs, owner: Owner, document: Any, wanted: NewRun
) -> tuple[Kept, bool]:
    """A run of a graph that is stored with it, if it isn't yet; nothing is if the run is refused."""
    graph = await _sound(graphs, document)
    if await _same_graph(graphs, owner, graph) is None:
        await _startable(graphs, owner, document_of(graph), graphs.sides.new_id(), wanted)
    stored = await create(graphs, owner, document)
    return await start(graphs, owner, stored.id, wanted)


async def _startable(
    graphs: Graphs, owner: Owner, document: Mapping[str, Any], run_id: UUID, wanted: NewRun
) -> tuple[Plan, Run]:
    """Raises all that speaks against the run; writes nothing of it."""
    plan = await _planned(graphs, document, wanted.inputs)
    inputs = await _with_files(graphs, owner, plan.graph, wanted.inputs)
    run = new_run(plan, run_id, inputs, max_tokens=wanted.max_tokens)
    await _require_payable(graphs, owner, plan, run)
    return plan, run


async def _require_payable(graphs: Graphs, owner: Owner, plan: Plan, run: Run) -> None:
    """What surely can't be paid to its end is not begun: nothing is spent on half of it."""
    least = quote(plan, run.inputs).tokens_min
    if run.max_tokens is not None and least > run.max_tokens:
        raise Conflict(
            f"the run costs at least {least:,} tokens, and may spend {run.max_tokens:,}",
            field="max_tokens",
            required_tokens=least,
            max_tokens=run.max_tokens,
        )
    pool = await graphs.sides.pool_of(owner.tenant_id)
    async with pool.look() as tx:
        balance = await ledger.balance(tx, owner.tenant_id, owner.user_id)
    if least > balance:
        raise InsufficientTokens(required_tokens=least, balance=balance)


def _run_id(graphs: Graphs, owner: Owner, graph_id: UUID, key: str | None) -> UUID:
    if key is None:
        return graphs.sides.new_id()
    return uuid5(graph_id, f"{owner.tenant_id}/{owner.user_id}/{key}")


async def _find(graphs: Graphs, owner: Owner, run_id: UUID) -> Kept | None:
    try:
        return await get_run(graphs, owner, run_id)
    except NotFound:
        return None


async def _require_same(graphs: Graphs, owner: Owner, before: Kept, wanted: NewRun) -> None:
    """The same file may be named by its own id, or by that of its media."""
    if before.head.is_expired:
        return  # nobody knows any more what it was
    given, known = _file_ids(wanted.inputs), _file_ids(before.head.inputs)
    bounds = new_run(before.plan, before.run.id, {}, max_tokens=wanted.max_tokens)
    is_same = (
        wanted.version in (None, before.head.graph_version)
        and bounds.max_tokens == before.head.max_tokens
    )
    if given != known and given.keys() == known.keys():
        given = _file_ids(await _with_files(graphs, owner, before.plan.graph, wanted.inputs))
    if given != known or not is_same:
        raise Conflict("idempotency_key was used for another run", field="idempotency_key")


async def _begun(graphs: Graphs, owner: Owner, run_id: UUID) -> Kept:
    """It is there; what can't be done now, the sweep will."""
    try:
        return await advance(graphs, owner.tenant_id, run_id)
    except (QueueFull, Unavailable):
        return await get_run(graphs, owner, run_id)


async def _with_files(
    graphs: Graphs, owner: Owner, graph: Graph, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Files that are given become references, if they are the user's own, wherever they stand."""
    nodes = {each.id: each for each in graph.nodes.values() if isinstance(each, InputNode)}
    named = sum(1 for _ in file_ids_in(inputs))
    if named > FILES_GIVEN_MAX:
        raise InvalidInput(f"the inputs name {named:,} files, more than {FILES_GIVEN_MAX:,}")
    return {
        name: await (_referred if _is_media(nodes[name]) else _with_own)(graphs, owner, name, value)
        for name, value in inputs.items()
    }


async def _with_own(graphs: Graphs, owner: Owner, name: str, value: Any) -> Any:
    """A value of any kind, with references in place of the files that it names."""
    if isinstance(value, list | tuple):
        return [await _with_own(graphs, owner, name, each) for each in value]
    if not isinstance(value, Mapping):
        return value
    if "file_id" in value:
        return await _referred(graphs, owner, name, value)
    return {field: await _with_own(graphs, owner, name, each) for field, each in value.items()}


def _is_media(node: InputNode) -> bool:
    wanted = type_named(node.value_type)
    while wanted and wanted.item:
        wanted = wanted.item
    return wanted is not None and wanted.name in MEDIA


async def _referred(graphs: Graphs, owner: Owner, name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [await _referred(graphs, owner, name, each) for each in value]
    file = await own_file(graphs, owner, _file_id(value))
    if file is None:
        refuse([Problem("unknown_file", f"there is no file {_file_id(value)!r:.60}", name)])
        return value
    try:
        pool = await graphs.sides.pool_of(owner.tenant_id)
        return reference(await arrived(graphs.sides, pool, file))
    except REFUSALS as error:
        return refuse([Problem("unusable_file", error.message, name)])


async def own_file(graphs: Graphs, owner: Owner, named: Any) -> File | None:
    """By its own id, or by that of the media that it is; None if it isn't the user's."""
    pool = await graphs.sides.pool_of(owner.tenant_id)
    try:
        wanted = UUID(str(named))
        async with pool.look() as tx:
            file = await files.get(tx, owner.tenant_id, await _file_of(tx, owner, wanted))
    except (ValueError, NotFound):
        return None
    return file if file.user_id == owner.user_id else None


async def _file_of(tx: Tx, owner: Owner, named: UUID) -> UUID:
    try:
        found = await media.get(tx, owner.tenant_id, owner.user_id, named)
    except NotFound:
        return named
    return found.original_file_id or named


def file_ids_in(value: Any) -> Iterator[str]:
    """Of all references in a value."""
    if isinstance(value, Mapping):
        if "file_id" in value:
            yield str(value["file_id"])
        for inner in value.values():
            yield from file_ids_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from file_ids_in(inner)


def _file_ids(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _file_id(value) for name, value in inputs.items()}


def _file_id(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_file_id(each) for each in value]
    return value["file_id"] if isinstance(value, Mapping) and "file_id" in value else value


async def get_run(graphs: Graphs, owner: Owner, run_id: UUID) -> Kept:
    pool = await graphs.sides.pool_of(owner.tenant_id)
    async with pool.look() as tx:
        kept = await graphs.runs.get(tx, owner.tenant_id, run_id)
    if kept.head.user_id != owner.user_id:
        raise NotFound(f"there is no graph run {run_id}")
    return kept


async def run_as_of_now(graphs: Graphs, owner: Owner, run_id: UUID) -> tuple[Kept, Run]:
    kept = await get_run(graphs, owner, run_id)
    return kept, await as_of_now(graphs, kept)


async def unable_nodes(graphs: Graphs, kept: Kept, run: Run) -> dict[str, str]:
    """Why jobs of these nodes wait: nobody can run them just now."""
    waiting = sorted(key for key in run.in_flight if run.record(key).status == Status.QUEUED)
    if not waiting:
        return {}
    world = await graphs.world.now(graphs.sides, kept.head.tenant_id)
    found = ((key, kept.plan.workflows[key.node]) for key in waiting)
    return {
        key.node: nobody(facts)
        for key, facts in found
        if is_ours(facts)
        and not alternatives(facts.need_for(run.record(key).inputs or {}), world.backends)
    }


async def cancel(graphs: Graphs, owner: Owner, run_id: UUID) -> Kept:
    """One that is over stays as it is."""
    await get_run(graphs, owner, run_id)

    async def decide(kept: Kept, world: Surroundings) -> Advance:
        return cancel_run(kept.plan, kept.run, world)

    return await change(graphs, owner.tenant_id, run_id, decide)


async def retry(
    graphs: Graphs,
    owner: Owner,
    run_id: UUID,
    *,
    backend: str | None = None,
    max_tokens: int | None = None,
) -> Kept:
    """`max_tokens` is a new bound in place of the run's own, never a lower one."""
    await get_run(graphs, owner, run_id)

    async def decide(kept: Kept, world: Surroundings) -> Advance:
        if kept.head.is_expired:
            raise Conflict("the time of this run is up: what it had done is gone")
        if backend is not None:
            _require_known(backend, world)
        run = kept.run
        if max_tokens is not None and run.max_tokens is not None:
            run = replace(run, max_tokens=max(max_tokens, run.max_tokens))
        return retry_run(kept.plan, run, world, backend=backend)

    await change(graphs, owner.tenant_id, run_id, decide, fresh=True)
    return await _begun(graphs, owner, run_id)


async def answer(graphs: Graphs, owner: Owner, run_id: UUID, said: Answer) -> Kept:
    await get_run(graphs, owner, run_id)

    async def decide(kept: Kept, world: Surroundings) -> Advance:
        _require_asking(kept, said.key)
        if said.choice == Choice.BACKEND:
            _require_able(kept, said, world)
        return next_actions(kept.plan, kept.run, (said,), world)

    await change(graphs, owner.tenant_id, run_id, decide, fresh=True)
    return await _begun(graphs, owner, run_id)


def the_question(kept: Kept) -> Key:
    """For an answer that names no node: the only question there is."""
    if len(kept.run.asking) != 1:
        asking = ", ".join(str(key) for key in sorted(kept.run.asking)) or "none"
        raise Conflict(f"name the node that the answer is for; asking: {asking}", field="node")
    return next(iter(kept.run.asking))


def _require_asking(kept: Kept, key: Key) -> None:
    if key.node not in kept.plan.graph.nodes:
        raise NotFound(f"the graph has no node {key.node}")
    is_open = kept.run.status == RunStatus.WAITING_FOR_USER
    if not is_open or kept.run.record(key).status != Status.ASKING:
        raise Conflict(f"{key} asks nothing (any more)")


def _require_able(kept: Kept, said: Answer, world: Surroundings) -> None:
    facts = kept.plan.workflows[said.key.node]
    need = facts.need_for(kept.run.record(said.key).inputs or {})
    if not said.backend:
        others = ", ".join(alternatives(need, world.backends)) or "none"
        raise InvalidInput(f"name the backend; online that can run it: {others}", field="backend")
    if not is_online(said.backend, need, world.backends):
        raise InvalidInput(
            f"{said.backend} is not online, or can't run {facts.slug}", field="backend"
        )


def _require_known(backend: str, world: Surroundings) -> None:
    if not any(each.is_meant_by(backend) for each in world.backends):
        raise InvalidInput(f"there is no backend {backend}", field="backend")
