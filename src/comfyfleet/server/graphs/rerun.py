"""Decides which results a rerun reuses from the earlier run. This module does no I/O.

A rerun reuses the result of an execution if neither its node nor any of its dependencies has
changed. Its successors are checked when it is decided, so the results of items and rounds are
reused individually."""

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

CHANGES_MAX = 100  # Maximum number of properties that a rerun can set.


@dataclass(frozen=True)
class EarlierRun:
    """A run whose results are reused, except for `changed` nodes and the nodes that depend on
    them."""

    plan: RunPlan  # The plan of the new run.
    before: RunPlan  # The plan of the earlier run.
    run: GraphRunState
    changed: frozenset[str]

    @cached_property
    def _results(self) -> Mapping[str, tuple[str, ...]]:
        """The nodes that produce the result of a round, by the id of the node that opens the
        rounds."""
        nodes, incoming = self.plan.graph.nodes.values(), self.plan.shape.incoming
        return {
            node.rounds: tuple(wire.source.node for wire in incoming[node.id])
            for node in nodes
            if isinstance(node, RoundEndNode)
        }

    def rounds_before(self, key: ExecutionKey) -> Iterator[ExecutionKey]:
        """Yields the executions of the previous rounds whose results this execution may read."""
        for depth, opener in enumerate(self.plan.scope(key.node)):
            if number := key.at[depth]:
                for source in self._results.get(opener, ()):
                    at = (*key.at[:depth], number - 1)
                    yield ExecutionKey(source, at[: len(self.plan.scope(source))])

    def width(self, opener: str, at: Index) -> int:
        """Returns the number of items or rounds in the earlier run."""
        outputs = self.run.record(ExecutionKey(opener, at)).outputs or {}
        return len(outputs.get(ITEM_PORT, ()))

    def result_of(self, key: ExecutionKey) -> ExecutionRecord | None:
        """Returns the record of an execution in the earlier run, if it had a result or was skipped
        because it had no inputs. Otherwise, returns None."""
        record = self.run.record(key)
        if isinstance(self.plan.node(key.node), RoundsNode):
            return None  # A loop isn't reused as a whole, but one round at a time.
        if (key.node in self.plan.bundles) != (key.node in self.before.bundles):
            return None  # Only one of the two plans requires the combined values of the node.
        if record.status == ExecutionStatus.DONE and record.outputs is not None:
            return record
        # If the execution had inputs, a person skipped it, and may decide differently now.
        is_unfed = record.status == ExecutionStatus.SKIPPED and record.inputs is None
        return record if is_unfed else None

    def source_of(self, key: ExecutionKey) -> Mapping[str, Any] | None:
        """Returns the origin of a result: its job and the run of that job, or the run in which a
        person answered a question."""
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
    """Checks whether running the node again may have a different result, because the node starts a
    job or asks a person."""
    return isinstance(node, WorkflowNode | ApproveNode)


def files_made(record: ExecutionRecord) -> tuple[UUID, ...]:
    """Returns the ids of the files that the execution's job produced."""
    output = (record.outputs or {}).get(OUTPUT_PORT)
    files = output.get("files", ()) if isinstance(output, Mapping) else ()
    return tuple(UUID(file["file_id"]) for file in files)


def least_tokens(plan: RunPlan, run: GraphRunState, kept: Collection[ExecutionKey]) -> int:
    """Returns the minimum cost of a rerun, excluding the results that it reuses."""
    if run.status.is_over:
        return 0
    has_kept = {key.node for key in kept}
    facts = {
        node: replace(workflow, price_tokens=0) if node in has_kept else workflow
        for node, workflow in plan.workflows.items()
    }
    # If a node already has some results, only its held executions are certain to start jobs.
    held = (key.node for key in run.held.values() if key.node in has_kept)
    certain = [node for node in held if not plan.workflow_node(node).reuse]
    others = quote_plan(replace(plan, workflows=facts), run.inputs).tokens_min
    return others + sum(plan.workflows[node].price_tokens for node in certain)


def inputs_read(plan: RunPlan, run: GraphRunState, kept: Collection[ExecutionKey]) -> set[str]:
    """Returns the inputs whose values are still needed for jobs or for the run's outputs."""
    had = Counter(key.node for key in kept)
    read: dict[str, bool] = {}
    for node in reversed(plan.shape.order):
        if isinstance(plan.node(node), WorkflowNode | OutputNode):
            read[node] = had[node] < max(1, run.tally(node).expected)
        else:
            read[node] = any(read[target] for target in plan.shape.targets[node])
    return {node for node in plan.roots if isinstance(plan.node(node), InputNode) and read[node]}


# Detecting changes


# These fields affect how a job runs, but not its result.
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
    """A run's plan and inputs, for detecting changes between two runs. The runs may belong to
    different graphs."""

    plan: RunPlan
    inputs: Mapping[str, Any]


def changed_nodes(before: RerunFrom, after: RerunFrom, *, start: str | None) -> frozenset[str]:
    """Returns the nodes that differ between the runs. The user wants to run `start` again, so the
    result also includes `start` and all nodes inside it."""
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
        node = replace(node, at_most=1)  # The number of rounds is compared at the end of the loop.
    if isinstance(node, WorkflowNode):
        node = replace(node, **{name: getattr(_USUAL, name) for name in _HOW_IT_RUNS})
    return type(node).__name__ + _text(asdict(node))


def _text(value: Any) -> str:
    """Returns the value as JSON text with sorted names. In JSON, unlike in Python, 1 differs from
    true."""
    return json.dumps(value, sort_keys=True, default=repr)


def require_node(plan: RunPlan, node: str) -> None:
    graph_node = plan.graph.nodes.get(node)
    if graph_node is None or is_hidden(graph_node):
        known = told_names(node.id for node in plan.source.nodes.values())
        message = f"the graph has no node {node!r:.80}; available nodes: {known}"
        raise InvalidInput(message, field="from")


# The functions below set properties of nodes for a single run.

_WORD = re.compile(r"[\w-]+")


def with_properties(document: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a graph's document with some properties set. The names have the form `node.property`.

    Setting a property removes its connection. Nodes that become unused are left out, because they
    would no longer lead to an output. Nodes inside a map or a loop have the same names as in runs,
    such as `refine/do`."""
    if len(values) > CHANGES_MAX:
        raise InvalidInput(f"set can have at most {CHANGES_MAX} properties", field="set")
    changed: dict[str, Any] = json.loads(json.dumps(document))
    for name, value in values.items():
        node, dot, port = name.partition(".")
        if not (node and dot and port):
            message = f"set {name!r:.80}: the name must have the form node.property"
            raise InvalidInput(message, field="set")
        _set(changed, tuple(node.split("/")), port, value, name)
    return _without_unused(changed, _used_nodes(document))


def _without_unused(document: dict[str, Any], were_used: Collection[str]) -> dict[str, Any]:
    """Removes nodes that were used before the change but are unused now."""
    while True:
        used = _used_nodes(document)
        unused = {node["id"] for node in document["nodes"] if node["id"] in were_used} - used
        if not unused:
            return document
        wires = document.get("connections", ())
        document = {
            **document,
            "nodes": [node for node in document["nodes"] if node["id"] not in unused],
            "connections": [wire for wire in wires if _wired_node(wire["to"]) not in unused],
        }


def _used_nodes(document: Mapping[str, Any]) -> set[str]:
    """Returns the nodes with outgoing connections, and the nodes that other nodes may refer to by
    name."""
    used = {_wired_node(wire["from"]) for wire in document.get("connections", ())}
    words = {node["id"]: _words_in(node) for node in document["nodes"]}
    readers = Counter(word for node_words in words.values() for word in node_words)
    return used | {node_id for node_id, own in words.items() if readers[node_id] > (node_id in own)}


def _wired_node(end: str) -> str:
    return end.partition(".")[0]


def _words_in(value: Any) -> set[str]:
    """Returns the words in all strings of a value. Field names are left out."""
    if isinstance(value, str):
        return set(_WORD.findall(value))
    if isinstance(value, Mapping):
        return {word for inner in value.values() for word in _words_in(inner)}
    if isinstance(value, list):
        return {word for item in value for word in _words_in(item)}
    return set()


def _set(level: dict[str, Any], way: tuple[str, ...], port: str, value: Any, name: str) -> None:
    """Sets a property of a node in the graph, or in the body of a map or a loop. `way` contains the
    ids of the enclosing nodes and of the node."""
    graph_node = _node_in(level, way[0])
    if graph_node is None:
        known = told_names(str(node.get("id")) for node in _nodes_of(level)) or "do"
        raise InvalidInput(f"set {name!r:.80}: unknown node; available: {known}", field="set")
    if len(way) > 1:
        if not isinstance(graph_node.get("do"), dict):
            message = "only properties of nodes inside a map or a loop can be set this way"
            raise InvalidInput(f"set {name!r:.80}: {message}", field="set")
        _set(graph_node["do"], way[1:], port, value, name)
        return
    fields = _fields_of(graph_node)
    if not isinstance(fields, dict):
        raise InvalidInput(f"set {name!r:.80}: the node has no properties", field="set")
    if fields is graph_node and port in ("id", "type"):
        raise InvalidInput(
            f"set {name!r:.80}: the id and type of a node can't be changed", field="set"
        )
    fields[port] = value
    wires, target = level.get("connections"), f"{way[0]}.{port}"
    if isinstance(wires, list):
        remaining = (
            wire for wire in wires if not isinstance(wire, dict) or wire.get("to") != target
        )
        level["connections"] = list(remaining)


def _node_in(level: dict[str, Any], node: str) -> dict[str, Any] | None:
    if "nodes" not in level:
        return level if node == "do" else None
    return next((candidate for candidate in _nodes_of(level) if candidate.get("id") == node), None)


def _nodes_of(level: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the nodes of a graph or a body. The document may be malformed, because it is only
    validated after all properties have been set."""
    nodes = level.get("nodes")
    return [node for node in nodes if isinstance(node, dict)] if isinstance(nodes, list) else []


_FIELDS = {"workflow": "properties", "value": "values", "graph": "inputs"}


def _fields_of(node: dict[str, Any]) -> Any:
    """Returns the dict with the properties of a node. For most kinds of nodes, this is the node
    itself."""
    kind = node.get("type") or ("graph" if "graph" in node else "workflow")
    name = _FIELDS.get(str(kind))
    return node if name is None else node.setdefault(name, {})
