"""Documents become graphs: every problem at once, each with its node and port."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from comfyfleet.graphs.conditions import Literal, parse_condition
from comfyfleet.graphs.documents import read_document
from comfyfleet.graphs.fields import Fields
from comfyfleet.graphs.limits import DEFAULT_LIMITS, GraphLimits
from comfyfleet.graphs.model import (
    ConditionNode,
    Connection,
    Fallback,
    FanOutMode,
    FanOutNode,
    Graph,
    InputNode,
    MergeMode,
    MergeNode,
    Node,
    OutputNode,
    Problem,
    Source,
    Target,
    WorkflowNode,
)
from comfyfleet.graphs.ports import type_named
from comfyfleet.kernel.errors import FleetError

NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
AFFINITY = re.compile(r"worker:[^\s:]\S{0,199}|fleet:[a-z0-9_-]+/[a-z0-9_-]+")
FROM, LATEST = "from", "latest"
TOKENS_MAX = 2**53


class Parsed(NamedTuple):
    """`broken` are the ids of nodes that could not be read: complaints about them were made."""

    graph: Graph
    problems: tuple[Problem, ...] = ()
    broken: frozenset[str] = frozenset()


def parse_text(text: str, limits: GraphLimits = DEFAULT_LIMITS) -> Parsed:
    return parse_graph(read_document(text), limits)


def parse_graph(document: Any, limits: GraphLimits = DEFAULT_LIMITS) -> Parsed:
    return _Parser(limits).graph(document)


class _Parser:
    def __init__(self, limits: GraphLimits) -> None:
        self.limits = limits
        self.problems: list[Problem] = []
        self.nodes: dict[str, Node] = {}
        self.broken: set[str] = set()
        self.connections: list[Connection] = []

    def graph(self, document: Any) -> Parsed:
        if not isinstance(document, dict):
            self.problems.append(Problem("invalid_document", "a graph must be an object"))
            return Parsed(Graph("", {}, ()), tuple(self.problems))
        fields = Fields(document, self.report_for(""))
        name = fields.text("name", required=True)
        max_tokens = fields.optional_whole("max_tokens", least=0, most=TOKENS_MAX)
        for entry in self.rows(fields, "nodes", self.limits.nodes_max):
            self.node(entry)
        for entry in self.rows(fields, "connections", self.limits.connections_max):
            self.connection(entry)
        fields.refuse_others()
        graph = Graph(name, self.nodes, tuple(self.connections), max_tokens)
        return Parsed(graph, tuple(self.problems), frozenset(self.broken))

    def report_for(self, node: str) -> Callable[[str, str, str], None]:
        def report(code: str, message: str, field: str) -> None:
            self.problems.append(Problem(code, message, node, field if node else ""))
            if node:
                self.broken.add(node)

        return report

    def rows(self, fields: Fields, name: str, most: int) -> list[Any]:
        rows = fields.take(name, [])
        if not isinstance(rows, list):
            fields.wrong(name, "a list")
            return []
        if len(rows) > most:
            self.problems.append(
                Problem("too_many", f"{len(rows):,} {name} are more than the {most:,} allowed")
            )
        return rows[:most]

    def node(self, entry: Any) -> None:
        node_id = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(node_id, str) or not NODE_ID.fullmatch(node_id):
            message = f"a node's id must be letters, digits, - and _ (at most 64), not {node_id!r}"
            self.problems.append(Problem("invalid_id", message))
            return
        if node_id in self.nodes or node_id in self.broken:
            self.problems.append(Problem("repeated_id", "two nodes have this id", node_id))
            return
        fields = Fields(entry, self.report_for(node_id))
        fields.known.update(("id", "type", "title"))
        reader = _READERS.get(str(entry.get("type")))
        if reader is None:
            fields.take("type")
            known = ", ".join(_READERS)
            fields.report("unknown_type", f"type must be one of {known}", "type")
            return
        node = reader(self, node_id, fields)
        fields.refuse_others()
        if node_id not in self.broken:
            self.nodes[node_id] = node

    def connection(self, entry: Any) -> None:
        if not isinstance(entry, dict) or set(entry) != {"from", "to"}:
            message = f"a connection must be an object with from and to, not {entry!r:.80}"
            self.problems.append(Problem("invalid_connection", message))
            return
        source, target = read_source(entry["from"]), read_target(entry["to"])
        if source is None:
            self.unreadable("from", entry["from"], "node.port")
        if target is None:
            self.unreadable("to", entry["to"], "node.port")
        if source and target:
            self.connections.append(Connection(source, target))

    def unreadable(self, end: str, value: Any, wanted: str) -> None:
        message = f"{end} must be written {wanted}, not {value!r:.80}"
        self.problems.append(Problem("invalid_connection", message))

    def input(self, node_id: str, fields: Fields) -> Node:
        value_type = fields.text("value_type") or "any"
        if type_named(value_type) is None:
            fields.wrong("value_type", "a type as image, text, number or text[]")
        default = fields.take("default")
        required = fields.truth("required", default is None)
        return InputNode(node_id, value_type, required, default)

    def workflow(self, node_id: str, fields: Fields) -> Node:
        limits = self.limits
        workflow, effect = named_work(fields)
        return WorkflowNode(
            node_id,
            workflow=workflow,
            effect=effect,
            version=read_version(fields),
            properties=self.properties(node_id, fields),
            backend_affinity=self.affinity(fields),
            fallback_strategy=fields.choice("fallback_strategy", Fallback.NONE),
            timeout_seconds=fields.optional_whole(
                "timeout", least=1, most=limits.timeout_seconds_max
            ),
            retries=fields.whole("retries", 0, least=0, most=limits.retries_max),
            priority=fields.whole(
                "priority", 0, least=-limits.priority_max, most=limits.priority_max
            ),
            continue_on_error=fields.truth("continue_on_error", False),
        )

    def affinity(self, fields: Fields) -> str | None:
        affinity = fields.text("backend_affinity")
        if affinity and not AFFINITY.fullmatch(affinity):
            fields.wrong("backend_affinity", "worker:ID or fleet:SLUG/STAGE")
        return affinity or None

    def properties(self, node_id: str, fields: Fields) -> Mapping[str, Any]:
        """`{from: node.port}` in place of a value is a connection."""
        literals: dict[str, Any] = {}
        for name, value in fields.mapping("properties").items():
            if not isinstance(value, dict) or set(value) != {FROM}:
                literals[name] = value
                continue
            source = read_source(value[FROM])
            if source is None:
                message = f"from must be written node.port, not {value[FROM]!r:.80}"
                fields.report("invalid_connection", message, name)
            else:
                self.connections.append(Connection(source, Target(node_id, name)))
        return literals

    def condition(self, node_id: str, fields: Fields) -> Node:
        fields.known.add("condition")
        text = fields.values.get("condition")
        if not isinstance(text, str):
            fields.report("missing_field", "condition must be a text", "condition")
            return ConditionNode(node_id, "", Literal(False))
        try:
            return ConditionNode(node_id, text, parse_condition(text))
        except FleetError as problem:
            fields.report("invalid_condition", problem.message, "condition")
            return ConditionNode(node_id, text, Literal(False))

    def fanout(self, node_id: str, fields: Fields) -> Node:
        limits = self.limits
        mode = fields.choice("mode", FanOutMode.BROADCAST)
        per_item = fields.truth("per_item", False)
        if per_item and mode == FanOutMode.BROADCAST:
            fields.report("invalid_field", "only distribute has items", "per_item")
        return FanOutNode(
            node_id,
            mode,
            output_count=fields.whole("output_count", 2, least=1, most=limits.fanout_outputs_max),
            per_item=per_item,
            max_items=fields.whole("max_items", 100, least=1, most=limits.fanout_items_max),
        )

    def merge(self, node_id: str, fields: Fields) -> Node:
        mode = fields.choice("mode", MergeMode.COLLECT)
        return MergeNode(node_id, mode, over=fields.text("over") or None)

    def output(self, node_id: str, fields: Fields) -> Node:
        return OutputNode(node_id)


_READERS: Mapping[str, Callable[[_Parser, str, Fields], Node]] = {
    "input": _Parser.input,
    "workflow": _Parser.workflow,
    "condition": _Parser.condition,
    "fanout": _Parser.fanout,
    "merge": _Parser.merge,
    "output": _Parser.output,
}


def named_work(fields: Fields) -> tuple[str, str | None]:
    """The workflow or the effect whose jobs do it: one of the two."""
    workflow, effect = fields.text("workflow"), fields.text("effect")
    if workflow and effect:
        fields.report("invalid_field", "name an effect or a workflow, not both", "effect")
    elif not workflow and not effect and not {"workflow", "effect"} & set(fields.values):
        fields.report("missing_field", "effect or workflow is missing", "workflow")
    return workflow, effect or None


def read_version(fields: Fields) -> int | None:
    if fields.take("version", LATEST) == LATEST:
        return None
    if fields.values.get("effect") is not None:
        fields.report("invalid_field", "an effect has no versions to choose from", "version")
    return fields.whole("version", 1, least=1, most=2**31 - 1)


def read_source(text: Any) -> Source | None:
    parts = text.split(".") if isinstance(text, str) else []
    if len(parts) < 2 or not all(parts):
        return None
    return Source(parts[0], parts[1], tuple(parts[2:]))


def read_target(text: Any) -> Target | None:
    node, dot, port = text.partition(".") if isinstance(text, str) else ("", "", "")
    return Target(node, port) if dot and node and port else None
