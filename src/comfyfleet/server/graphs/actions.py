"""Implements users' actions on graphs and runs, from storing a graph to answering questions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID, uuid5

from comfyfleet.api.graph_model import (
    MEDIA,
    DocumentProblem,
    GraphDefinition,
    InputNode,
    input_type,
    type_named,
)
from comfyfleet.api.graph_parse import parse_graph, write_graph
from comfyfleet.api.graph_spellings import full_backend_name
from comfyfleet.api.graphs import GraphPort, GraphPorts
from comfyfleet.errors import (
    Conflict,
    Forbidden,
    InsufficientTokens,
    InvalidInput,
    LimitExceeded,
    NotFound,
    QueueFull,
    Unavailable,
)
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.graphs import store
from comfyfleet.server.graphs.apply import (
    GraphContext,
    LoadedRun,
    apply_decision,
    decide_slice,
    decisions,
    file_reference,
)
from comfyfleet.server.graphs.catalogue import GraphCatalogue
from comfyfleet.server.graphs.decide import (
    deadline_from,
    decide_cancel,
    decide_retry,
    new_run,
)
from comfyfleet.server.graphs.document_work import check_size, compute
from comfyfleet.server.graphs.draft import RunDecision
from comfyfleet.server.graphs.environment import read_graph_catalogue
from comfyfleet.server.graphs.expand import (
    NO_GRAPHS,
    GraphLibrary,
    GraphName,
    expand,
    subgraph_names,
)
from comfyfleet.server.graphs.plan import (
    RunPlan,
    RunQuote,
    plan_of,
    quote_plan,
    raise_problems,
    require_few_executions,
)
from comfyfleet.server.graphs.run import (
    Choice,
    Environment,
    ExecutionKey,
    ExecutionStatus,
    GraphListItem,
    GraphRunState,
    GraphRunStatus,
    QuestionAnswered,
    RunListItem,
    RunRow,
    StoredGraph,
    alternatives,
    is_online,
    is_self_hosted,
    no_backend_message,
)
from comfyfleet.server.graphs.runner import advance, with_live_progress
from comfyfleet.server.graphs.snapshot import dump_plan
from comfyfleet.server.graphs.validate import GraphCheck, check_graph, check_inputs, output_types
from comfyfleet.server.jobs.files import REFUSALS, confirm_upload
from comfyfleet.server.jobs.idempotency import key_conflict
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File
from comfyfleet.server.tenants import wallet as ledger

FILES_GIVEN_MAX = 10_000
SAME_NAME_MAX = 50  # Maximum number of graphs with the same name that a new graph is compared with.
SUBGRAPHS_MAX = 50  # Maximum number of subgraphs in a graph.


@dataclass(frozen=True, slots=True)
class Owner:
    """The tenant that owns graphs, and the user who owns runs."""

    tenant_id: UUID
    user_id: UUID


class CheckedDocument(NamedTuple):
    """A validated graph, with the catalog and the subgraphs that were used for validation."""

    check: GraphCheck
    catalogue: GraphCatalogue
    library: GraphLibrary
    document: Any

    def plan(self) -> RunPlan:
        """Returns the run plan. Planning a large graph is slow, so call this through `compute`."""
        return plan_of(self.check.graph, self.catalogue, self.library)


async def check_document(
    graphs: GraphContext, owner: Owner, document: Any, *, known: GraphLibrary = NO_GRAPHS
) -> CheckedDocument:
    """Validates a graph. Subgraphs in `known` replace stored ones, which may have been deleted."""
    parsed = await compute(owner.tenant_id, document, partial(parse_graph, document))
    library = {**await _read_library(graphs, owner, parsed.graph), **known}
    work = [document, *map(write_graph, library.values())]  # Subgraphs count toward the size.
    expanded = await compute(owner.tenant_id, work, lambda: expand(parsed.graph, library).graph)
    async with graphs.context.central.read() as tx:
        catalogue = await read_graph_catalogue(tx, expanded, graphs.context)
    check = partial(check_graph, document, catalogue, library=library)
    return CheckedDocument(await compute(owner.tenant_id, work, check), catalogue, library, work)


async def _read_library(
    graphs: GraphContext, owner: Owner, graph: GraphDefinition
) -> dict[GraphName, GraphDefinition]:
    """Reads all subgraphs of a graph, including nested ones. Skips graphs that don't exist."""
    library: dict[GraphName, GraphDefinition] = {}
    visited: set[GraphName] = set()
    waiting = list(subgraph_names(graph))
    while waiting and len(visited) < SUBGRAPHS_MAX:
        name, version = waiting.pop()
        if (name, version) in visited:
            continue
        visited.add((name, version))
        try:
            stored = await get_graph(graphs, owner, await find_graph(graphs, owner, name), version)
        except NotFound:
            continue
        document = dict(stored.document)
        parsed = await compute(owner.tenant_id, document, partial(parse_graph, document))
        library[name, version] = parsed.graph
        waiting += subgraph_names(library[name, version])
    return library


async def graph_ports(
    graphs: GraphContext, owner: Owner, graph_id: UUID, version: int | None = None
) -> GraphPorts:
    """Returns the inputs and outputs of a stored graph, with their types."""
    stored = await get_graph(graphs, owner, graph_id, version)
    document = dict(stored.document)
    graph = (await compute(owner.tenant_id, document, partial(parse_graph, document))).graph
    library = await _read_library(graphs, owner, graph)
    types = await compute(owner.tenant_id, [document] * 2, partial(output_types, graph, library))
    inputs = (node for node in graph.nodes.values() if isinstance(node, InputNode))
    return GraphPorts(
        inputs=tuple(
            GraphPort(name=node.id, type=str(input_type(node)), required=node.required)
            for node in inputs
        ),
        outputs=tuple(
            GraphPort(name=name, type=str(value_type)) for name, value_type in types.items()
        ),
    )


async def _require_valid(graphs: GraphContext, owner: Owner, document: Any) -> GraphDefinition:
    checked = await check_document(graphs, owner, document)
    raise_problems(list(checked.check.problems))
    quote = await quote_checked(graphs, owner, checked, {})
    require_few_executions(quote, graphs.context.settings.max_executions_per_graph_run)
    return checked.check.graph


async def create_graph(graphs: GraphContext, owner: Owner, document: Any) -> StoredGraph:
    """Stores a graph. Returns the user's existing graph if it has the same name and content."""
    graph, _ = await create_graph_once(graphs, owner, document)
    return graph


async def create_graph_once(
    graphs: GraphContext, owner: Owner, document: Any
) -> tuple[StoredGraph, bool]:
    """Stores a graph. Returns the graph and whether it is new."""
    graph = await _require_valid(graphs, owner, document)
    context = graphs.context
    if same := await _same_graph(graphs, owner, graph):
        return same, False
    stored = StoredGraph(
        context.new_id(),
        owner.tenant_id,
        owner.user_id,
        graph.name,
        1,
        write_graph(graph),
        context.clock(),
    )
    async with context.tenant_transaction(owner.tenant_id) as tx:
        most = context.settings.max_graphs_per_user
        if await store.count_graphs(tx, owner.tenant_id, owner.user_id) >= most:
            raise LimitExceeded(f"you already have {most:,} graphs (the limit); delete some first")
        await store.add_graph(tx, stored)
    return stored, True


async def _same_graph(
    graphs: GraphContext, owner: Owner, graph: GraphDefinition
) -> StoredGraph | None:
    async with graphs.context.tenant(owner.tenant_id) as tx:
        candidates = await store.graphs_named(
            tx, owner.tenant_id, graph.name, user_id=owner.user_id, limit=SAME_NAME_MAX
        )
    document = write_graph(graph)
    return next((stored for stored in candidates if dict(stored.document) == document), None)


async def find_graph(graphs: GraphContext, owner: Owner, text: str) -> UUID:
    """Finds a graph's id by its id or name. Prefers the user's own graphs, then the newest."""
    try:
        return UUID(text)
    except ValueError:
        pass
    async with graphs.context.tenant(owner.tenant_id) as tx:
        matches = await store.graphs_named(
            tx, owner.tenant_id, text, user_id=owner.user_id, limit=1
        ) or await store.graphs_named(tx, owner.tenant_id, text, limit=1)
    if not matches:
        raise NotFound(f"graph {text!r:.100} was not found")
    return matches[0].id


async def delete_graph(graphs: GraphContext, owner: Owner, graph_id: UUID) -> None:
    """Deletes a graph. Its active runs continue."""
    _require_own(await get_graph(graphs, owner, graph_id), owner)
    async with graphs.context.tenant_transaction(owner.tenant_id) as tx:
        await store.delete_graph(tx, owner.tenant_id, graph_id, now=graphs.context.clock())


def _require_own(graph: StoredGraph, owner: Owner) -> None:
    """Checks that the user created the graph. Other users of the tenant can only run it."""
    if graph.user_id != owner.user_id:
        raise Forbidden("only the creator of this graph can change it; store a copy instead")


async def add_graph_version(
    graphs: GraphContext, owner: Owner, graph_id: UUID, document: Any
) -> StoredGraph:
    """Adds a version to a graph. Only its creator can do this. Active runs keep their version."""
    _require_own(await get_graph(graphs, owner, graph_id), owner)
    graph = await _require_valid(graphs, owner, document)
    async with graphs.context.tenant_transaction(owner.tenant_id) as tx:
        version = await store.next_version(tx, owner.tenant_id, graph_id, graph.name)
        if version is None:
            raise NotFound(f"graph {graph_id} was not found")
        stored = StoredGraph(
            graph_id,
            owner.tenant_id,
            owner.user_id,
            graph.name,
            version,
            write_graph(graph),
            graphs.context.clock(),
        )
        await store.add_version(tx, stored)
    return stored


async def get_graph(
    graphs: GraphContext, owner: Owner, graph_id: UUID, version: int | None = None
) -> StoredGraph:
    async with graphs.context.tenant(owner.tenant_id) as tx:
        graph = await store.get_graph(tx, owner.tenant_id, graph_id, version)
    if graph is None:
        which = "" if version is None else f" version {version}"
        raise NotFound(f"graph {graph_id}{which} was not found")
    return graph


async def _plan(
    graphs: GraphContext, owner: Owner, document: Mapping[str, Any], inputs: Mapping[str, Any]
) -> RunPlan:
    """Validates and plans a stored graph again, because its workflows may have changed."""
    checked = await check_document(graphs, owner, dict(document))
    raise_problems([*checked.check.problems, *check_inputs(checked.check.graph, inputs)])
    return await compute(owner.tenant_id, checked.document, checked.plan)


async def quote_run(
    graphs: GraphContext,
    owner: Owner,
    graph_id: UUID,
    inputs: Mapping[str, Any],
    *,
    version: int | None = None,
) -> RunQuote:
    """Estimates a run's price and duration. Assumes the maximum length for missing lists."""
    stored = await get_graph(graphs, owner, graph_id, version)
    checked = await check_document(graphs, owner, dict(stored.document))
    raise_problems(list(checked.check.problems))
    return await quote_checked(graphs, owner, checked, inputs)


async def quote_checked(
    graphs: GraphContext, owner: Owner, checked: CheckedDocument, inputs: Mapping[str, Any]
) -> RunQuote:
    """Estimates the price and duration of running a valid graph."""
    online = sum(backend.is_online for backend in checked.catalogue.backends)
    most = graphs.context.settings.max_queued_per_graph_run

    def work() -> RunQuote:
        return quote_plan(checked.plan(), inputs, side_by_side=min(online, most))

    priced = await compute(owner.tenant_id, checked.document, work)
    return replace(priced, warnings=checked.check.warnings)


# Runs


@dataclass(frozen=True, slots=True)
class NewGraphRun:
    inputs: Mapping[str, Any]
    version: int | None = None
    max_tokens: int | None = None
    idempotency_key: str | None = None


async def start_run(
    graphs: GraphContext, owner: Owner, graph_id: UUID, wanted: NewGraphRun
) -> tuple[LoadedRun, bool]:
    """Starts a run. Returns it and whether it is new. A request with the same key and the same
    contents returns the existing run."""
    check_size(wanted.inputs)
    run_id = _run_id(graphs, owner, graph_id, wanted.idempotency_key)
    if wanted.idempotency_key and (before := await find_run(graphs, owner, run_id)):
        await _require_same(graphs, owner, before, wanted)
        return before, False
    stored = await get_graph(graphs, owner, graph_id, wanted.version)
    plan, run = await _prepare_run(graphs, owner, stored.document, run_id, wanted)
    head = RunRow(
        id=run_id,
        tenant_id=owner.tenant_id,
        user_id=owner.user_id,
        graph_id=graph_id,
        graph_version=stored.version,
        snapshot=await compute(owner.tenant_id, stored.document, partial(dump_plan, plan)),
        inputs={**run.inputs},
        max_tokens=run.max_tokens,
        created_at=graphs.context.clock(),
        changed_at=graphs.context.clock(),
        deadline_at=run.deadline_at,
    )
    async with graphs.context.tenant_transaction(owner.tenant_id) as tx:
        is_new = await store.add_run(tx, head)
    if is_new:
        graphs.runs.keep(LoadedRun(head, plan, run, 0))
    else:  # Another request with the same key was faster.
        await _require_same(graphs, owner, await get_run(graphs, owner, run_id), wanted)
    return await advance_new(graphs, owner, run_id), is_new


async def start_document_run(
    graphs: GraphContext, owner: Owner, document: Any, wanted: NewGraphRun
) -> tuple[LoadedRun, bool]:
    """Starts a run of a graph document. Stores a new graph, unless the run is refused."""
    check_size(wanted.inputs)
    graph = await _require_valid(graphs, owner, document)
    if await _same_graph(graphs, owner, graph) is None:
        await _prepare_run(graphs, owner, write_graph(graph), graphs.context.new_id(), wanted)
    stored = await create_graph(graphs, owner, document)
    return await start_run(graphs, owner, stored.id, wanted)


async def _prepare_run(
    graphs: GraphContext,
    owner: Owner,
    document: Mapping[str, Any],
    run_id: UUID,
    wanted: NewGraphRun,
) -> tuple[RunPlan, GraphRunState]:
    """Plans a run without storing it. Raises an error if the run can't start."""
    plan = await _plan(graphs, owner, document, wanted.inputs)
    inputs = await replace_files(graphs, owner, plan.graph, wanted.inputs)
    run = new_run(plan, run_id, inputs, max_tokens=wanted.max_tokens)
    run = replace(run, deadline_at=deadline_from(plan, graphs.context.clock()))
    quote = await compute(owner.tenant_id, document, partial(quote_plan, plan, run.inputs))
    require_few_executions(quote, graphs.context.settings.max_executions_per_graph_run)
    await require_payable(graphs, owner, run, quote.tokens_min)
    return plan, run


async def require_payable(
    graphs: GraphContext, owner: Owner, run: GraphRunState, least: int
) -> None:
    """Raises an error if the run's minimum price exceeds its spending limit or the balance."""
    if run.max_tokens is not None and least > run.max_tokens:
        raise Conflict(
            f"the run costs at least {least:,} tokens, more than its limit of {run.max_tokens:,}",
            field="max_tokens",
            required_tokens=least,
            max_tokens=run.max_tokens,
        )
    async with graphs.context.tenant(owner.tenant_id) as tx:
        balance = await ledger.balance(tx, owner.tenant_id, owner.user_id)
    if least > balance:
        raise InsufficientTokens(required_tokens=least, balance=balance)


def _run_id(graphs: GraphContext, owner: Owner, graph_id: UUID, key: str | None) -> UUID:
    if key is None:
        return graphs.context.new_id()
    return uuid5(graph_id, f"{owner.tenant_id}/{owner.user_id}/{key}")


async def find_run(graphs: GraphContext, owner: Owner, run_id: UUID) -> LoadedRun | None:
    try:
        return await get_run(graphs, owner, run_id)
    except NotFound:
        return None


async def _require_same(
    graphs: GraphContext, owner: Owner, before: LoadedRun, wanted: NewGraphRun
) -> None:
    """Raises Conflict if the request differs from the earlier one with the same key. Both the id of
    a file and the id of its media item refer to the file."""
    if before.head.is_expired:
        return  # An expired run no longer has its original inputs.
    requested, known = _file_ids(wanted.inputs), _file_ids(before.head.inputs)
    bounds = new_run(before.plan, before.run.id, {}, max_tokens=wanted.max_tokens)
    is_same = (
        wanted.version in (None, before.head.graph_version)
        and bounds.max_tokens == before.head.max_tokens
    )
    if requested != known and requested.keys() == known.keys():
        requested = _file_ids(await replace_files(graphs, owner, before.plan.graph, wanted.inputs))
    if requested != known or not is_same:
        raise key_conflict()


async def advance_new(graphs: GraphContext, owner: Owner, run_id: UUID) -> LoadedRun:
    """Advances a new run. If that isn't possible now, a sweep advances it later."""
    try:
        return await advance(graphs, owner.tenant_id, run_id)
    except (QueueFull, Unavailable):
        return await get_run(graphs, owner, run_id)


async def replace_files(
    graphs: GraphContext, owner: Owner, graph: GraphDefinition, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Replaces file ids in inputs with file references. Refuses files of other users."""
    nodes = {node.id: node for node in graph.nodes.values() if isinstance(node, InputNode)}
    named = sum(1 for _ in file_ids_in(inputs))
    if named > FILES_GIVEN_MAX:
        raise InvalidInput(f"the inputs refer to {named:,} files; the limit is {FILES_GIVEN_MAX:,}")
    return {
        name: await _replace_in_input(graphs, owner, nodes[name], value)
        for name, value in inputs.items()
    }


async def _replace_in_input(graphs: GraphContext, owner: Owner, node: InputNode, value: Any) -> Any:
    if _is_media(node):
        return await _to_reference(graphs, owner, node.id, value)
    media_columns = [name for name, kind in node.columns.items() if kind in MEDIA]
    if not media_columns:
        names_files = next(file_ids_in(value), None) is not None
        return await _replace_own_files(graphs, owner, node.id, value) if names_files else value
    if len(value) * len(media_columns) > FILES_GIVEN_MAX:
        raise InvalidInput(f"the table refers to more than {FILES_GIVEN_MAX:,} files")
    return [
        {
            name: await (_to_reference if name in media_columns else _replace_own_files)(
                graphs, owner, node.id, cell
            )
            for name, cell in row.items()
        }
        for row in value
    ]


async def _replace_own_files(graphs: GraphContext, owner: Owner, name: str, value: Any) -> Any:
    """Replaces file ids inside a value of any type with file references."""
    if isinstance(value, list | tuple):
        return [await _replace_own_files(graphs, owner, name, item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "file_id" in value:
        return await _to_reference(graphs, owner, name, value)
    return {
        field: await _replace_own_files(graphs, owner, name, inner)
        for field, inner in value.items()
    }


def _is_media(node: InputNode) -> bool:
    value_type = type_named(node.value_type)
    while value_type and value_type.item:
        value_type = value_type.item
    return value_type is not None and value_type.name in MEDIA


async def _to_reference(graphs: GraphContext, owner: Owner, name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [await _to_reference(graphs, owner, name, item) for item in value]
    file = await own_file(graphs, owner, _file_id(value))
    if file is None:
        raise_problems(
            [DocumentProblem("unknown_file", f"file {_file_id(value)!r:.60} was not found", name)]
        )
        return value
    try:
        pool = await graphs.context.pool_of(owner.tenant_id)
        return file_reference(await confirm_upload(graphs.context, pool, file))
    except REFUSALS as error:
        return raise_problems([DocumentProblem("unusable_file", error.message, name)])


async def own_file(graphs: GraphContext, owner: Owner, named: Any) -> File | None:
    """Finds the user's file by its own id or by its media item's id, or returns None."""
    try:
        requested_id = UUID(str(named))
        async with graphs.context.tenant(owner.tenant_id) as tx:
            file = await media.get_file(
                tx, owner.tenant_id, await _file_of(tx, owner, requested_id)
            )
    except (ValueError, NotFound):
        return None
    return file if file.user_id == owner.user_id else None


async def _file_of(tx: Tx, owner: Owner, named: UUID) -> UUID:
    try:
        media_item = await media.get_media(tx, owner.tenant_id, owner.user_id, named)
    except NotFound:
        return named
    return media_item.original_file_id or named


def file_ids_in(value: Any) -> Iterator[str]:
    """Yields the file ids of all file references in a value."""
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
        return [_file_id(item) for item in value]
    return value["file_id"] if isinstance(value, Mapping) and "file_id" in value else value


async def get_run(graphs: GraphContext, owner: Owner, run_id: UUID) -> LoadedRun:
    async with graphs.context.tenant(owner.tenant_id) as tx:
        loaded = await graphs.runs.get(tx, owner.tenant_id, run_id)
    if loaded.head.user_id != owner.user_id:
        raise NotFound(f"graph run {run_id} was not found")
    return loaded


async def get_live_run(
    graphs: GraphContext, owner: Owner, run_id: UUID
) -> tuple[LoadedRun, GraphRunState]:
    loaded = await get_run(graphs, owner, run_id)
    return loaded, await with_live_progress(graphs, loaded)


async def unservable_nodes(
    graphs: GraphContext, loaded: LoadedRun, run: GraphRunState
) -> dict[str, str]:
    """Returns the nodes with queued jobs that no backend can run now, each with the reason."""
    waiting = sorted(
        key for key in run.in_flight if run.record(key).status == ExecutionStatus.QUEUED
    )
    if not waiting:
        return {}
    environment = await graphs.environment.now(graphs.context, loaded.head.tenant_id)
    queued = ((key, loaded.plan.workflows[key.node]) for key in waiting)
    return {
        key.node: no_backend_message(facts)
        for key, facts in queued
        if is_self_hosted(facts)
        and not alternatives(facts.need_for(run.record(key).inputs or {}), environment.backends)
    }


async def cancel_graph_run(graphs: GraphContext, owner: Owner, run_id: UUID) -> LoadedRun:
    """Cancels a run. Has no effect on a finished run."""
    await get_run(graphs, owner, run_id)

    async def decide(loaded: LoadedRun, environment: Environment) -> RunDecision:
        work = partial(decide_cancel, loaded.plan, loaded.run, environment)
        return await decisions.run(owner.tenant_id, work)

    return await apply_decision(graphs, owner.tenant_id, run_id, decide)


async def retry_graph_run(
    graphs: GraphContext,
    owner: Owner,
    run_id: UUID,
    *,
    backend: str | None = None,
    max_tokens: int | None = None,
) -> LoadedRun:
    """Retries a failed run. `max_tokens` can only raise the run's spending limit."""
    await get_run(graphs, owner, run_id)
    backend = full_backend_name(backend) if backend else backend

    async def decide(loaded: LoadedRun, environment: Environment) -> RunDecision:
        if loaded.head.is_expired:
            raise Conflict("the run has expired, and its results were deleted")
        if backend is not None:
            _require_known(backend, environment)
        run = loaded.run
        if max_tokens is not None and run.max_tokens is not None:
            run = replace(run, max_tokens=max(max_tokens, run.max_tokens))
        work = partial(decide_retry, loaded.plan, run, environment, backend=backend)
        return await decisions.run(owner.tenant_id, work)

    await apply_decision(graphs, owner.tenant_id, run_id, decide, fresh=True)
    return await advance_new(graphs, owner, run_id)


async def answer_question(
    graphs: GraphContext,
    owner: Owner,
    run_id: UUID,
    answer: QuestionAnswered,
    *,
    for_all: bool = False,
) -> LoadedRun:
    """Answers a question. If `for_all` is set, answers all open questions of the same node."""
    await get_run(graphs, owner, run_id)
    if answer.backend:
        answer = replace(answer, backend=full_backend_name(answer.backend))

    async def decide(loaded: LoadedRun, environment: Environment) -> RunDecision:
        same = sorted(key for key in loaded.run.asking if key.node == answer.key.node)
        answers = [replace(answer, key=key) for key in same if for_all] or [answer]
        for item_answer in answers:
            _require_asking(loaded, item_answer.key)
            _require_answerable(loaded, item_answer)
            if item_answer.choice == Choice.BACKEND:
                _require_able(loaded, item_answer, environment)
        return await decide_slice(loaded, loaded.run, answers, environment)

    await apply_decision(graphs, owner.tenant_id, run_id, decide, fresh=True)
    return await advance_new(graphs, owner, run_id)


def only_question(loaded: LoadedRun) -> ExecutionKey:
    """Returns the key of the run's only open question, for an answer that doesn't name a node."""
    if not loaded.run.asking:
        raise Conflict("the run has no open question")
    if len(loaded.run.asking) > 1:
        asking = ", ".join(str(key) for key in sorted(loaded.run.asking))
        raise Conflict(f"specify the node to answer; open questions: {asking}", field="node")
    return next(iter(loaded.run.asking))


def _require_asking(loaded: LoadedRun, key: ExecutionKey) -> None:
    if key.node not in loaded.plan.graph.nodes:
        raise NotFound(f"the graph has no node {key.node}")
    is_open = loaded.run.status == GraphRunStatus.WAITING_FOR_USER
    if not is_open or loaded.run.record(key).status != ExecutionStatus.ASKING:
        raise Conflict(f"{key} has no open question")


def _require_answerable(loaded: LoadedRun, answer: QuestionAnswered) -> None:
    question = loaded.run.record(answer.key).question
    if question is None:
        return
    if answer.choice not in question.choices:
        choices = ", ".join(question.choices)
        raise InvalidInput(f"{answer.key} can be answered with {choices}", field="choice")
    picked = answer.picked
    if picked is None:
        return
    if answer.choice != Choice.APPROVE or question.pick_from is None:
        raise InvalidInput(f"{answer.key} has nothing to pick from", field="picked")
    if len(set(picked)) < len(picked) or not all(0 <= n < question.pick_from for n in picked):
        most = question.pick_from - 1
        raise InvalidInput(f"picked must be unique numbers from 0 to {most}", field="picked")


def _require_able(loaded: LoadedRun, answer: QuestionAnswered, environment: Environment) -> None:
    facts = loaded.plan.workflows[answer.key.node]
    need = facts.need_for(loaded.run.record(answer.key).inputs or {})
    if not answer.backend:
        others = ", ".join(alternatives(need, environment.backends)) or "none"
        raise InvalidInput(
            f"specify a backend; online backends that can run it: {others}", field="backend"
        )
    if not is_online(answer.backend, need, environment.backends):
        raise InvalidInput(
            f"{answer.backend} is not online or can't run {facts.slug}", field="backend"
        )


def _require_known(backend: str, environment: Environment) -> None:
    if not any(state.is_target_of(backend) for state in environment.backends):
        raise InvalidInput(f"backend {backend} was not found", field="backend")


PAGE_MAX = 200


async def list_graphs(
    graphs: GraphContext, owner: Owner, *, before: UUID | None = None, limit: int
) -> list[GraphListItem]:
    """Returns a page of graphs, newest first. `before` is the last id of the previous page."""
    async with graphs.context.tenant(owner.tenant_id) as tx:
        last = await store.get_graph_item(tx, owner.tenant_id, before) if before else None
        if before and last is None:
            raise NotFound(f"graph {before} was not found")
        return await store.list_graphs(tx, owner.tenant_id, before=last, limit=min(limit, PAGE_MAX))


async def list_runs(
    graphs: GraphContext,
    owner: Owner,
    *,
    graph_id: UUID | None = None,
    status: GraphRunStatus | None = None,
    rerun_of: UUID | None = None,
    before: UUID | None = None,
    limit: int,
) -> list[RunListItem]:
    """Returns a page of runs, newest first. `before` is the last id of the previous page."""
    whose = (owner.tenant_id, owner.user_id)
    async with graphs.context.tenant(owner.tenant_id) as tx:
        last = await store.get_run_item(tx, *whose, before) if before else None
        if before and last is None:
            raise NotFound(f"graph run {before} was not found")
        return await store.list_runs(
            tx,
            *whose,
            graph_id=graph_id,
            status=status,
            rerun_of=rerun_of,
            before=last,
            limit=min(limit, PAGE_MAX),
        )


RUNS_PER_PASS_MAX = 100


async def expire_runs(pool: Database, tenant_id: UUID, *, before: datetime) -> int:
    """Expires all runs that ended before the given time, and returns their number."""
    expired = 0
    while True:
        async with pool.transaction() as tx:
            some = await store.expire_runs(
                tx, tenant_id, ended_before=before, limit=RUNS_PER_PASS_MAX
            )
        expired += len(some)
        if len(some) < RUNS_PER_PASS_MAX:
            return expired


async def input_files_of_open_runs(tx: Tx, tenant_id: UUID) -> set[UUID]:
    """Returns the ids of active runs' input files, because the nodes may still need them."""
    open_inputs = await store.inputs_of_open_runs(tx, tenant_id)
    return {UUID(file_id) for inputs in open_inputs for file_id in _open_file_ids(inputs)}


async def jobs_reused_by_open_runs(tx: Tx, tenant_id: UUID) -> set[UUID]:
    """Returns the ids of jobs whose results active runs have reused, and whose files they need."""
    return await store.jobs_reused_by_open_runs(tx, tenant_id)


def _open_file_ids(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("file_id"), str):
            yield value["file_id"]
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _open_file_ids(inner)
