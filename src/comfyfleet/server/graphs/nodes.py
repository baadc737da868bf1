"""Decides the outcome of a node when all its inputs are decided: a result, a job, a question, a
skip or a failure. This module does no I/O."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from comfyfleet.api.expressions import (
    MISSING,
    NOTES_MAX,
    ROOT,
    FieldPath,
    MissingField,
    Read,
    StepCount,
    compute,
    compute_score,
    evaluate,
    evaluate_condition,
    value_at,
)
from comfyfleet.api.functions import is_number
from comfyfleet.api.graph_model import (
    DEFAULT_PORT,
    FALSE_PORT,
    INDEX_PORT,
    INPUT_PORT,
    ITEM_PORT,
    OUTPUT_PORT,
    OUTPUTS_PORT,
    ROUND_PORT,
    ROUNDS_PORT,
    TRUE_PORT,
    VALUE_PORT,
    ApproveNode,
    ClosingNode,
    ConditionNode,
    FanOutMode,
    FanOutNode,
    GraphConnection,
    InputNode,
    LoopEndNode,
    MergeMode,
    MergeNode,
    Node,
    RankNode,
    ResultsNode,
    RoundEndNode,
    RoundsNode,
    SwitchNode,
    ValueNode,
    WorkflowNode,
    is_reference,
    opens_scope,
    port_number,
    reference_port,
    value_for,
)
from comfyfleet.api.templates import fill, templates_in
from comfyfleet.errors import FleetError, LimitExceeded
from comfyfleet.server.graphs.draft import DECISION_STEPS_MAX, RunDraft
from comfyfleet.server.graphs.run import (
    APPROVAL_CHOICES,
    ExecutionKey,
    ExecutionStatus,
    UserQuestion,
)


class NoValue:
    """A placeholder for a value that will never arrive, because its source was skipped or another
    port of the source fired."""


NO_VALUE = NoValue()
NOT_REACHED = "a required input has no value"


class NodeFired(NamedTuple):
    """The outcome of a node that is done. `outputs` contains the values of its ports."""

    outputs: Mapping[str, Any]
    inputs: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @property
    def values(self) -> tuple[Any, ...]:
        # Both the inputs and the outputs are recorded, even if a node only passes on its input.
        return (self.outputs, self.inputs)


class JobNeeded(NamedTuple):
    """The outcome of a node that needs a job with these properties."""

    properties: Mapping[str, Any]

    @property
    def values(self) -> tuple[Any, ...]:
        return (self.properties,)


class NodeSkipped(NamedTuple):
    reason: str


class NodeImpossible(NamedTuple):
    message: str


class NodeAsks(NamedTuple):
    """The outcome of a node that waits for a person's answer."""

    question: UserQuestion
    inputs: Mapping[str, Any]

    @property
    def values(self) -> tuple[Any, ...]:
        return (self.inputs,)


NodeOutcome: TypeAlias = NodeFired | JobNeeded | NodeSkipped | NodeImpossible | NodeAsks


TOO_MANY_STEPS = f"this decision about the run takes more than {DECISION_STEPS_MAX:,} steps"
# The number of steps that each execution adds, not counting its connections and expressions.
EXECUTION_STEPS = 10


def run_node(draft: RunDraft, key: ExecutionKey) -> NodeOutcome:
    """Decides the outcome of an execution when all its inputs are decided. A decision may cover
    thousands of executions or connections. The execution fails if the decision takes too many
    steps, so that it can't delay other work."""
    try:
        draft.steps.add(EXECUTION_STEPS)
        fired = _run_node(draft, key)
    except LimitExceeded:
        return NodeImpossible(TOO_MANY_STEPS)
    is_spent = draft.steps.count > DECISION_STEPS_MAX
    return NodeImpossible(TOO_MANY_STEPS) if is_spent else fired


def _run_node(draft: RunDraft, key: ExecutionKey) -> NodeOutcome:
    node = draft.plan.node(key.node)
    if isinstance(node, InputNode):
        return NodeFired({VALUE_PORT: draft.was.inputs.get(node.id, node.default)})
    if isinstance(node, ClosingNode):
        return _close(draft, key, node)
    incoming = draft.plan.shape.incoming[key.node]
    draft.steps.add(len(incoming))
    arrived = {
        connection.target.port: value_arriving(draft, connection, key) for connection in incoming
    }
    return _unfed(draft, key, arrived) or _work(draft, key, node, arrived)


def value_arriving(draft: RunDraft, connection: GraphConnection, key: ExecutionKey) -> Any:
    """Returns the value at the source of a connection. Returns NO_VALUE if it will never arrive,
    and MISSING if the value lacks the connection's path."""
    source = connection.source
    depth = len(draft.plan.scope(source.node))
    record = draft.record(ExecutionKey(source.node, key.at[:depth]))
    if record.status != ExecutionStatus.DONE or record.outputs is None:
        return NO_VALUE
    is_inside = len(key.at) > depth and opens_scope(draft.plan.node(source.node))
    if is_inside and source.port in _NUMBERS:
        return key.at[depth] + _NUMBERS[source.port]
    if source.port not in record.outputs:
        return NO_VALUE
    value = record.outputs[source.port]
    if is_inside and source.port == ITEM_PORT:
        value = value[key.at[depth]]
    return value_at(value, source.path)


# The number of the first item and of the first round.
_NUMBERS = {INDEX_PORT: 0, ROUND_PORT: 1}


def _unfed(
    draft: RunDraft, key: ExecutionKey, arrived: Mapping[str, Any]
) -> NodeSkipped | NodeImpossible | None:
    """Decides the outcome of a node that lacks a required value, or returns None. Values for
    templates are checked when the templates are filled, because a template may have a default."""
    fixed = {port: value for port, value in arrived.items() if not is_reference(port)}
    dead = [port for port, value in fixed.items() if value is NO_VALUE]
    needed = draft.plan.needed[key.node]
    is_all = bool(dead) and all(value is NO_VALUE for value in arrived.values())
    if is_all or not needed.isdisjoint(dead):
        return NodeSkipped(NOT_REACHED)
    for port, value in fixed.items():
        if value is MISSING and port in needed:
            return NodeImpossible(
                f"no value arrives at {port}, because {_source(draft, key.node, port)} is missing"
            )
    return None


def _source(draft: RunDraft, node: str, port: str) -> str:
    incoming = draft.plan.shape.incoming[node]
    return next(
        (str(connection.source) for connection in incoming if connection.target.port == port),
        "its template",
    )


def _work(
    draft: RunDraft, key: ExecutionKey, node: Node, arrived: Mapping[str, Any]
) -> NodeOutcome:
    match node:
        case WorkflowNode():
            return _properties(draft, node, arrived)
        case ValueNode():
            return _values(draft, node, arrived)
        case FanOutNode(mode=FanOutMode.BROADCAST):
            return NodeFired(dict.fromkeys(node.outputs, arrived[INPUT_PORT]), arrived)
        case FanOutNode():
            return _distribute(node, arrived[node.input_port])
        case RoundsNode():
            return NodeFired({ITEM_PORT: [arrived[INPUT_PORT]]})
        case RoundEndNode():
            return _judge_round(draft, key, node, arrived[INPUT_PORT])
        case ConditionNode() | SwitchNode() | ApproveNode():
            return _junction(draft, node, arrived)
    # Records an output's value only once, because a large result would otherwise count twice.
    return NodeFired(arrived)


def _junction(
    draft: RunDraft, node: ConditionNode | SwitchNode | ApproveNode, arrived: Mapping[str, Any]
) -> NodeOutcome:
    value = arrived[INPUT_PORT]
    if isinstance(node, ApproveNode):
        return _ask(draft, node, arrived)
    if isinstance(node, ConditionNode):
        verdict = evaluate(node.expression, value, StepCount(draft.steps))
        port = TRUE_PORT if verdict.value else FALSE_PORT
        return NodeFired({port: value}, arrived, verdict.notes)
    notes: list[str] = []
    for case in node.cases:
        verdict = evaluate(case.expression, value, StepCount(draft.steps))
        notes += verdict.notes
        if verdict.value:
            return NodeFired({case.name: value}, arrived, verdict.notes)
    return NodeFired({DEFAULT_PORT: value}, arrived, tuple(dict.fromkeys(notes))[:NOTES_MAX])


def _ask(draft: RunDraft, node: ApproveNode, arrived: Mapping[str, Any]) -> NodeOutcome:
    items = items_to_pick(arrived[INPUT_PORT])
    if node.pick and items is None:
        return NodeImpossible(
            "the input has no items to pick from; it must be a list or a result with images"
        )
    seconds = node.deadline_seconds
    return NodeAsks(
        UserQuestion(
            node.message,
            choices=APPROVAL_CHOICES,
            deadline=draft.environment.now + timedelta(seconds=seconds) if seconds else None,
            pick_from=len(items) if node.pick and items is not None else None,
        ),
        arrived,
    )


def items_to_pick(value: Any) -> list[Any] | None:
    """Returns the items that a user can pick from: the items of a list or a result's images."""
    if isinstance(value, Mapping):
        value = value.get("images")
    return list(value) if isinstance(value, list | tuple) else None


def picked_value(value: Any, picked: Sequence[int] | None) -> Any:
    """Returns the picked items of a value. Without a selection, returns the whole value."""
    items = items_to_pick(value)
    if picked is None or items is None:
        return value
    chosen = [items[number] for number in picked]
    return {"images": chosen} if isinstance(value, Mapping) else chosen


# Templates


def _read(arrived: Mapping[str, Any]) -> Read:
    def read(path: FieldPath) -> Any:
        value = arrived.get(reference_port(path), MISSING)
        return MISSING if value is NO_VALUE else value

    return read


def _reader(named: Mapping[str, Any]) -> Read:
    return lambda path: value_at(named, (path.root, *path.segments))


def _is_unreached(value: Any, arrived: Mapping[str, Any]) -> bool:
    """Checks whether a template reads a value that will never arrive."""
    paths = (path for template in templates_in(value) for path in template.needed_paths)
    return any(arrived.get(reference_port(path)) is NO_VALUE for path in paths)


def _values(draft: RunDraft, node: ValueNode, arrived: Mapping[str, Any]) -> NodeOutcome:
    """Computes the values of a value node. Leaves out values whose template reads a value that will
    never arrive."""
    values: dict[str, Any] = {}
    for name, value in node.values.items():
        if _is_unreached(value, arrived):
            continue
        try:
            values[name] = fill(value, _read(arrived), StepCount(draft.steps))
        except FleetError as problem:
            return NodeImpossible(f"{name}: {problem.message}")
    if node.values and not values:
        return NodeSkipped(NOT_REACHED)
    return NodeFired({**values, OUTPUTS_PORT: values} if node.id in draft.plan.bundles else values)


def _properties(draft: RunDraft, node: WorkflowNode, arrived: Mapping[str, Any]) -> NodeOutcome:
    """Returns the properties of a job. For missing properties, the workflow's defaults apply. The
    node is skipped if a template without a default reads a value that will never arrive."""
    values = {port: value for port, value in arrived.items() if not is_reference(port)}
    for name, value in node.properties.items():
        if _is_unreached(value, arrived):
            return NodeSkipped(NOT_REACHED)
        try:
            values[name] = fill(value, _read(arrived), StepCount(draft.steps))
        except FleetError as problem:
            return NodeImpossible(f"{name}: {problem.message}")
    properties: dict[str, Any] = {}
    for port, value in values.items():
        if isinstance(value, NoValue | MissingField):
            continue
        fitting = value_for(draft.plan.wanted_type(node.id, port), value)
        if fitting is MISSING:
            expected_type = draft.plan.wanted_type(node.id, port)
            return NodeImpossible(
                f"{_source(draft, node.id, port)} has no {expected_type} for {port}"
            )
        properties[port] = fitting
    return JobNeeded(properties)


# The functions below split lists into items, and collect the results of items and rounds.


def _distribute(node: FanOutNode, value: Any) -> NodeOutcome:
    items = value.get("items") if isinstance(value, Mapping) else value
    if not isinstance(items, list | tuple):
        return NodeImpossible("the input is not a list")
    if len(items) > node.max_items:
        return NodeImpossible(f"the list has {len(items):,} items; max_items is {node.max_items:,}")
    if node.per_item:
        return NodeFired({ITEM_PORT: list(items)})
    chunks = zip(node.outputs, _chunks(items, node.output_count), strict=True)
    # A port without items doesn't fire, because a job without items would be useless.
    return NodeFired({port: {"items": chunk} for port, chunk in chunks if chunk})


def _chunks(items: Sequence[Any], count: int) -> list[list[Any]]:
    """Splits items into consecutive chunks whose lengths differ by at most one."""
    size, longer = divmod(len(items), count)
    ends = [number * size + min(number, longer) for number in range(count + 1)]
    return [list(items[start:end]) for start, end in pairwise(ends)]


def _judge_round(
    draft: RunDraft, key: ExecutionKey, node: RoundEndNode, result: Any
) -> NodeOutcome:
    number = key.at[-1]
    rounds = draft.record(ExecutionKey(node.rounds, key.at[:-1])).outputs or {}
    named = {ROOT: result, "previous": rounds[ITEM_PORT][number], ROUND_PORT: number + 1}
    verdict = evaluate_condition(node.until, named, StepCount(draft.steps))
    score, notes = None, verdict.notes
    if node.best is not None:
        try:
            score = compute(node.best, _reader(named), StepCount(draft.steps))
        except FleetError as problem:
            notes = (*notes, f"best: {problem.message}")
    return NodeFired({"done": verdict.value, "score": score}, notes=notes)


def _close(draft: RunDraft, key: ExecutionKey, node: ClosingNode) -> NodeOutcome:
    """Collects the values of all items or rounds in order."""
    if node.over is None:
        return _merge(node, _arrived(draft, key, [key]))
    if draft.record(ExecutionKey(node.over, key.at)).status != ExecutionStatus.DONE:
        return NodeSkipped(NOT_REACHED)
    places = [ExecutionKey(key.node, (*key.at, n)) for n in range(draft.width(node.over, key.at))]
    arrived = _arrived(draft, key, places)
    match node:
        case MergeNode():
            return _merge(node, arrived)
        case LoopEndNode():
            return _end_loop(draft, key, node, arrived)
        case ResultsNode():
            return _results(draft, key, node, arrived)
        case RankNode():
            return _rank(draft, key, node, arrived)


def _arrived(draft: RunDraft, key: ExecutionKey, places: Sequence[ExecutionKey]) -> list[Any]:
    incoming = sorted(
        draft.plan.shape.incoming[key.node],
        key=lambda connection: port_number(connection.target.port) or 0,
    )
    draft.steps.add(len(incoming) * len(places))
    return [value_arriving(draft, connection, place) for place in places for connection in incoming]


def _merge(node: ClosingNode, arrived: Sequence[Any]) -> NodeOutcome:
    """Merges the values that arrived and leaves out skipped ones. A merge over zero items isn't
    skipped, but has an empty result."""
    alive = [value for value in arrived if _is_value(value)]
    if not alive and node.over is None:
        return NodeSkipped(NOT_REACHED)
    if isinstance(node, MergeNode) and node.mode == MergeMode.CONCAT_IMAGES:
        return NodeFired({OUTPUT_PORT: {"images": list(_pictures(alive))}})
    return NodeFired({OUTPUT_PORT: {"merged": alive, "count": len(alive)}})


def _is_value(value: Any) -> bool:
    return not isinstance(value, NoValue | MissingField)


def _end_loop(
    draft: RunDraft, key: ExecutionKey, node: LoopEndNode, arrived: Sequence[Any]
) -> NodeOutcome:
    judged = [
        draft.record(ExecutionKey(node.judge, (*key.at, number))).outputs or {}
        for number in range(len(arrived))
    ]
    alive = [number for number, value in enumerate(arrived) if _is_value(value)]
    if not alive:
        return NodeSkipped(NOT_REACHED)
    best = alive[-1]
    scores = {n: judged[n]["score"] for n in alive if is_number(judged[n].get("score"))}
    if node.has_best and scores:
        best = max(scores, key=lambda number: (scores[number], -number))
    outputs = {
        OUTPUT_PORT: arrived[best],
        ROUNDS_PORT: len(arrived),
        "done": bool(judged[-1].get("done")),
        "score": scores.get(best),
    }
    return NodeFired(outputs)


def _items(draft: RunDraft, key: ExecutionKey, over: str) -> Sequence[Any]:
    record = draft.record(ExecutionKey(over, key.at))
    return list((record.outputs or {})[ITEM_PORT])


def _results(
    draft: RunDraft, key: ExecutionKey, node: ResultsNode, arrived: Sequence[Any]
) -> NodeOutcome:
    rows: list[dict[str, Any]] = []
    items = _items(draft, key, node.over)
    for index, (item, value) in enumerate(zip(items, arrived, strict=True)):
        row = {"index": index, "item": item}
        if _is_value(value):
            rows.append({**row, "output": value})
        else:
            rows.append({**row, "error": _error_of_item(draft, node.over, (*key.at, index))})
    results = [row["output"] for row in rows if "output" in row]
    outputs = {
        "results": rows,
        "count": len(rows),
        "failed": len(rows) - len(results),
        "images": list(_pictures(results)),
    }
    return NodeFired({OUTPUT_PORT: outputs})


def _error_of_item(draft: RunDraft, over: str, at: tuple[int, ...]) -> str:
    for member in draft.plan.members[over]:
        error = draft.record(ExecutionKey(member, at)).error
        if error:
            return error
    return "skipped"


def _rank(
    draft: RunDraft, key: ExecutionKey, node: RankNode, arrived: Sequence[Any]
) -> NodeOutcome:
    scored: list[dict[str, Any]] = []
    items = _items(draft, key, node.over)
    for index, (item, value) in enumerate(zip(items, arrived, strict=True)):
        if not _is_value(value):
            continue
        try:
            score = compute_score(node.score, value, StepCount(draft.steps))
        except FleetError as problem:
            return NodeImpossible(f"item {index} has no score: {problem.message}")
        scored.append({"index": index, "item": item, "score": score})
    scored.sort(key=lambda row: (-row["score"], row["index"]))
    best = scored[: node.keep]
    outputs = {
        "scored": scored,
        "best": best,
        "images": list(_pictures([row["item"] for row in best])),
        "score": best[0]["score"] if best else None,
    }
    return NodeFired({OUTPUT_PORT: outputs})


def _pictures(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        if "file_id" in value:
            yield value
        elif "images" in value:
            yield from value["images"] or ()
        else:  # These are the outputs of a subgraph.
            yield from (file for inner in _objects_in(value) for file in _pictures(inner))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _pictures(item)
    elif isinstance(value, str):
        yield value


def _objects_in(value: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (inner for inner in value.values() if isinstance(inner, Mapping))
