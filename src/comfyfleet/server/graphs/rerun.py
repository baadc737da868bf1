"""What a rerun takes from the run before it: which nodes have changed, and which results stay. Pure.

An execution is kept if neither its node nor anything that it depends on has changed, and it had a result. The
executions that depend on it are looked at when it is decided, so items and rounds are kept one by one."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple
from uuid import UUID

from comfyfleet.api.graph_model import (
    ITEM_PORT,
    OUTPUT_PORT,
    ApproveNode,
    InputNode,
    Node,
    OutputNode,
    RoundEndNode,
    RoundsNode,
    WorkflowNode,
    is_hidden,
    told_names,
)
from comfyfleet.errors import InvalidInput
from comfyfleet.server.graphs.plan import RunPlan, quote_plan
from comfyfleet.server.graphs.run import (
    ExecutionKey,
    ExecutionRecord,
    ExecutionStatus,
    GraphRunState,
    Index,
    job_id,
)

CHANGES_MAX = 100  # properties that a rerun may set


@dataclass(frozen=True)
class EarlierRun:
    """A run whose results are taken, except those of `changed` nodes and of what depends on them."""

    plan: RunPlan  # of the new run
    before: RunPlan
    run: GraphRunState
    changed: frozenset[str]

    @cached_property
    def _results(self) -> Mapping[str, tuple[str, ...]]:
        """The nodes that give the result of a round, by the node that begins the rounds."""
        nodes, incoming = self.plan.graph.nodes.values(), self.plan.shape.incoming
        return {
            each.rounds: tuple(wire.source.node for wire in incoming[each.id])
            for each in nodes
            if isinstance(each, RoundEndNode)
        }

    def rounds_before(self, key: ExecutionKey) -> Iterator[ExecutionKey]:
        """Yields what an execution in a later round may read of the round before."""
        for depth, opener in enumerate(self.plan.scope(key.node)):
            if number := key.at[depth]:
                for source in self._results.get(opener, ()):
                    at = (*key.at[:depth], number - 1)
                    yield ExecutionKey(source, at[: len(self.plan.scope(source))])

    def width(self, opener: str, at: Index) -> int:
        """Returns how many items or rounds there were."""
        outputs = self.run.record(ExecutionKey(opener, at)).outputs or {}
        return len(outputs.get(ITEM_PORT, ()))

    def result_of(self, key: ExecutionKey) -> ExecutionRecord | None:
        """Returns the record of an execution that had a result, or was skipped for want of inputs."""
        record = self.run.record(key)
        if isinstance(self.plan.node(key.node), RoundsNode):
            return None  # they come one by one
        if (key.node in self.plan.bundles) != (key.node in self.before.bundles):
            return None  # its values are to be put together, or no longer
        if record.status == ExecutionStatus.DONE and record.outputs is not None:
            return record
        # One that had its inputs was skipped by a person, who may choose otherwise now.
        is_unfed = record.status == ExecutionStatus.SKIPPED and record.inputs is None
        return record if is_unfed else None

    def source_of(self, key: ExecutionKey) -> Mapping[str, Any] | None:
        """Returns where a result came from: its job and the run that made it, or the run in which a person answered."""
        record, node = self.run.record(key), self.plan.node(key.node)
        if record.reused_from is not None:
            return record.reused_from
        if isinstance(node, WorkflowNode):
            made_by = job_id(self.run.id, key, record.attempt)
            return {"job_id": str(made_by), "run_id": str(self.run.id)}
        if isinstance(node, ApproveNode):
            return {"job_id": None, "run_id": str(self.run.id)}
        return None


def decides_anew(node: Node) -> bool:
    """Whether another execution may give another result: a job, or a person's answer."""
    return isinstance(node, WorkflowNode | ApproveNode)


def files_made(record: ExecutionRecord) -> tuple[UUID, ...]:
    """Returns the files that the job of an execution has made."""
    output = (record.outputs or {}).get(OUTPUT_PORT)
    made = output.get("files", ()) if isinstance(output, Mapping) else ()
    return tuple(UUID(each["file_id"]) for each in made)


def least_tokens(plan: RunPlan, run: GraphRunState, kept: Collection[ExecutionKey]) -> int:
    """Returns what a run that has begun with kept results costs at least."""
    if run.status.is_over:
        return 0
    has_kept = {key.node for key in kept}
    facts = {
        node: replace(each, price_tokens=0) if node in has_kept else each
        for node, each in plan.workflows.items()
    }
    # Of nodes with some results, only what is about to start is certain.
    held = (key.node for key in run.held.values() if key.node in has_kept)
    certain = [node for node in held if not plan.workflow_node(node).reuse]
    others = quote_plan(replace(plan, workflows=facts), run.inputs).tokens_min
    return others + sum(plan.workflows[node].price_tokens for node in certain)


def inputs_read(plan: RunPlan, run: GraphRunState, kept: Collection[ExecutionKey]) -> set[str]:
    """Returns the inputs whose values jobs still need, or that the run puts out."""
    had = Counter(key.node for key in kept)
    read: dict[str, bool] = {}
    for node in reversed(plan.shape.order):
        if isinstance(plan.node(node), WorkflowNode | OutputNode):
            read[node] = had[node] < max(1, run.tally(node).expected)
        else:
            read[node] = any(read[target] for target in plan.shape.targets[node])
    return {node for node in plan.roots if isinstance(plan.node(node), InputNode) and read[node]}


# What has changed


# How a job is run, and not what it makes.
_USUAL = WorkflowNode("")
_HOW_IT_RUNS = (
    "fallback_strategy",
    "timeout_seconds",
    "retries",
    "priority",
    "continue_on_error",
    "reuse",
)


class RerunFrom(NamedTuple):
    """The values that two runs of perhaps different graphs were given."""

    plan: RunPlan
    inputs: Mapping[str, Any]


def changed_nodes(before: RerunFrom, after: RerunFrom, *, start: str | None) -> frozenset[str]:
    """Returns the nodes that differ, and those that are to be run again by name: `start`, and all that is inside it."""
    return frozenset(
        node
        for node in after.plan.graph.nodes
        if node == start
        or (start and node.startswith(f"{start}/"))
        or _differs(before, after, node)
    )


def _differs(before: RerunFrom, after: RerunFrom, node: str) -> bool:
    old, new = before.plan.graph.nodes.get(node), after.plan.graph.nodes[node]
    if isinstance(old, InputNode) and isinstance(new, InputNode):
        return _text(_given(before, old)) != _text(_given(after, new))
    if old is None or _definition(old) != _definition(new):
        return True
    openers = (before.plan.graph.openers.get(node), after.plan.graph.openers.get(node))
    wires = (before.plan.shape.incoming[node], after.plan.shape.incoming[node])
    return openers[0] != openers[1] or set(wires[0]) != set(wires[1])


def _given(of: RerunFrom, node: InputNode) -> Any:
    return of.inputs.get(node.id, node.default)


def _definition(node: Node) -> str:
    if isinstance(node, RoundsNode):
        node = replace(node, at_most=1)  # how many rounds there were is compared where they end
    if isinstance(node, WorkflowNode):
        node = replace(node, **{name: getattr(_USUAL, name) for name in _HOW_IT_RUNS})
    return type(node).__name__ + _text(asdict(node))


def _text(value: Any) -> str:
    """As JSON, where 1 is not true and the order of names doesn't matter."""
    return json.dumps(value, sort_keys=True, default=repr)


def require_node(plan: RunPlan, node: str) -> None:
    found = plan.graph.nodes.get(node)
    if found is None or is_hidden(found):
        known = told_names(each.id for each in plan.source.nodes.values())
        raise InvalidInput(f"the graph has no node {node!r:.80}; it has {known}", field="from")


# Properties that are set for one run

_WORD = re.compile(r"[\w-]+")


def with_properties(document: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a graph's document with properties set, each named `node.property`.

    What a connection fed is no longer connected, and nodes that fed nothing else are left out: no output could be reached
    from them. A node inside a map or a loop is named as runs show it: `refine/do`.
    """
    if len(values) > CHANGES_MAX:
        raise InvalidInput(f"set has more than {CHANGES_MAX} properties", field="set")
    changed: dict[str, Any] = json.loads(json.dumps(document))
    for name, value in values.items():
        node, dot, port = name.partition(".")
        if not (node and dot and port):
            raise InvalidInput(f"set {name!r:.80}: it must be node.property", field="set")
        _set(changed, tuple(node.split("/")), port, value, name)
    return _without_unused(changed, _used_nodes(document))


def _without_unused(document: dict[str, Any], were_used: Collection[str]) -> dict[str, Any]:
    """Leaves out nodes that something read before the change and that nothing reads now."""
    while True:
        used = _used_nodes(document)
        unused = {each["id"] for each in document["nodes"] if each["id"] in were_used} - used
        if not unused:
            return document
        wires = document.get("connections", ())
        document = {
            **document,
            "nodes": [each for each in document["nodes"] if each["id"] not in unused],
            "connections": [each for each in wires if _wired_node(each["to"]) not in unused],
        }


def _used_nodes(document: Mapping[str, Any]) -> set[str]:
    """Returns the nodes that a connection starts from, or that a text of another node may name."""
    used = {_wired_node(each["from"]) for each in document.get("connections", ())}
    words = {each["id"]: _words_in(each) for each in document["nodes"]}
    readers = Counter(word for found in words.values() for word in found)
    return used | {each for each, own in words.items() if readers[each] > (each in own)}


def _wired_node(end: str) -> str:
    return end.partition(".")[0]


def _words_in(value: Any) -> set[str]:
    """Returns the words of all texts in a value; names of fields are none."""
    if isinstance(value, str):
        return set(_WORD.findall(value))
    if isinstance(value, Mapping):
        return {word for each in value.values() for word in _words_in(each)}
    if isinstance(value, list):
        return {word for each in value for word in _words_in(each)}
    return set()


def _set(level: dict[str, Any], way: tuple[str, ...], port: str, value: Any, name: str) -> None:
    """Sets a property of a node of one level: a graph, or what a map or a loop runs."""
    found = _node_in(level, way[0])
    if found is None:
        known = told_names(str(each.get("id")) for each in _nodes_of(level)) or "do"
        raise InvalidInput(
            f"set {name!r:.80}: there is no such node; there are {known}", field="set"
        )
    if len(way) > 1:
        if not isinstance(found.get("do"), dict):
            message = "only what is inside a map or a loop of this graph can be set"
            raise InvalidInput(f"set {name!r:.80}: {message}", field="set")
        _set(found["do"], way[1:], port, value, name)
        return
    fields = _fields_of(found)
    if not isinstance(fields, dict):
        raise InvalidInput(f"set {name!r:.80}: what the node has there has no names", field="set")
    if fields is found and port in ("id", "type"):
        raise InvalidInput(f"set {name!r:.80}: a node keeps its id and type", field="set")
    fields[port] = value
    wires, target = level.get("connections"), f"{way[0]}.{port}"
    if isinstance(wires, list):
        kept = (each for each in wires if not isinstance(each, dict) or each.get("to") != target)
        level["connections"] = list(kept)


def _node_in(level: dict[str, Any], node: str) -> dict[str, Any] | None:
    if "nodes" not in level:
        return level if node == "do" else None
    return next((each for each in _nodes_of(level) if each.get("id") == node), None)


def _nodes_of(level: dict[str, Any]) -> list[dict[str, Any]]:
    """A level may be nonsense: it is validated when all is set."""
    nodes = level.get("nodes")
    return [each for each in nodes if isinstance(each, dict)] if isinstance(nodes, list) else []


_FIELDS = {"workflow": "properties", "value": "values", "graph": "inputs"}


def _fields_of(node: dict[str, Any]) -> Any:
    """Returns where the properties of a node are; those of most kinds are its fields."""
    kind = node.get("type") or ("graph" if "graph" in node else "workflow")
    name = _FIELDS.get(str(kind))
    return node if name is None else node.setdefault(name, {})
