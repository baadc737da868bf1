"""Parses documents to graphs and reports all problems together. Also writes graphs as documents."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from comfyfleet.api.documents import FieldReader, did_you_mean, read_document
from comfyfleet.api.expressions import (
    ROOT,
    Expression,
    FieldPath,
    LiteralValue,
    parse_condition,
    parse_expression,
)
from comfyfleet.api.graph_model import (
    ANY,
    DEFAULT_LIMITS,
    DEFAULT_PORT,
    OUTPUT_PORT,
    OUTPUTS_PORT,
    SCALARS,
    ApproveNode,
    ConditionNode,
    ConnectionSource,
    ConnectionTarget,
    DeadlineChoice,
    DocumentProblem,
    Fallback,
    FanOutMode,
    FanOutNode,
    GraphBody,
    GraphConnection,
    GraphDefinition,
    GraphLimits,
    InputNode,
    LoopNode,
    MapNode,
    MergeMode,
    MergeNode,
    Node,
    OutputNode,
    ScoreNode,
    SubgraphNode,
    SwitchCase,
    SwitchNode,
    ValueNode,
    WorkflowNode,
    inputs_of,
    kind_of,
    outputs_of,
    told_names,
    type_named,
)
from comfyfleet.api.graph_spellings import CONFIG, with_our_spelling
from comfyfleet.api.templates import parse_templates, template_characters, write_templates
from comfyfleet.errors import FleetError, LimitExceeded

NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
AFFINITY = re.compile(r"worker:[^\s:]\S{0,199}|fleet:[a-z0-9_-]+/[a-z0-9_-]+")
FROM, LATEST = "from", "latest"
ENDS_CHARACTERS_MAX = 80  # maximum length of a connection's end in an error
TOKENS_MAX = 2**53
EXPRESSION_CHARACTERS_MAX = 200_000  # for all templates and conditions of a graph together
PLACE_MAX = 1_000_000  # maximum coordinate in pixels, positive or negative


class ParsedGraph(NamedTuple):
    """A graph and its problems. `broken` contains the ids of nodes that could not be read and were
    reported."""

    graph: GraphDefinition
    problems: tuple[DocumentProblem, ...] = ()
    broken: frozenset[str] = frozenset()


def parse_graph_text(text: str, limits: GraphLimits = DEFAULT_LIMITS) -> ParsedGraph:
    return parse_graph(read_document(text), limits)


def parse_graph(document: Any, limits: GraphLimits = DEFAULT_LIMITS) -> ParsedGraph:
    return _Parser(limits).graph(with_our_spelling(document))


class _Parser:
    def __init__(self, limits: GraphLimits) -> None:
        self.limits = limits
        self.problems: list[DocumentProblem] = []
        self.nodes: dict[str, Node] = {}
        self.broken: set[str] = set()
        self.connections: list[GraphConnection] = []
        self.settings: dict[str, Any] = {"priority": 0, "reuse": False}  # the defaults for nodes
        self.prefix = ""  # the prefix of nodes inside a map or a loop
        self.characters = 0  # total length of all parsed templates and expressions

    def graph(self, document: Any) -> ParsedGraph:
        if not isinstance(document, dict):
            self.problems.append(DocumentProblem("invalid_document", "a graph must be an object"))
            return ParsedGraph(GraphDefinition("", {}, ()), tuple(self.problems))
        fields = FieldReader(document, self.report_for(""))
        name = fields.text("name", required=True)
        max_tokens = fields.optional_whole("max_tokens", least=0, most=TOKENS_MAX)
        self.settings = self.graph_settings(fields)
        for entry in self.rows(fields, "nodes", self.limits.nodes_max):
            self.node(entry)
        for entry in self.rows(fields, "connections", self.limits.connections_max):
            self.connection(entry)
        layout = self.layout(fields)
        fields.refuse_others()
        connections = tuple(self.connections)
        graph = GraphDefinition(name, self.nodes, connections, max_tokens, layout, **self.settings)
        return ParsedGraph(graph, tuple(self.problems), frozenset(self.broken))

    def graph_settings(self, fields: FieldReader) -> dict[str, Any]:
        limits = self.limits
        return {
            "reuse": fields.truth("reuse", False),
            "priority": self.priority(fields, 0),
            "at_once": fields.optional_whole("at_once", least=1, most=limits.at_once_max),
            "deadline_seconds": fields.optional_whole(
                "deadline", least=1, most=limits.timeout_seconds_max
            ),
        }

    def priority(self, fields: FieldReader, default: int) -> int:
        most = self.limits.priority_max
        return fields.whole("priority", default, least=-most, most=most)

    def report_for(self, node: str) -> Callable[[str, str, str], None]:
        def report(code: str, message: str, field: str) -> None:
            place = f"{self.prefix}{node}" if node else ""
            self.problems.append(DocumentProblem(code, message, place, field if node else ""))
            if node:
                self.broken.add(node)

        return report

    def rows(self, fields: FieldReader, name: str, most: int) -> list[Any]:
        rows = fields.take(name, [])
        if not isinstance(rows, list):
            fields.wrong(name, "a list")
            return []
        if len(rows) > most:
            self.problems.append(
                DocumentProblem(
                    "too_many", f"{len(rows):,} {name} are more than the {most:,} allowed"
                )
            )
        return rows[:most]

    def node(self, entry: Any) -> None:
        node_id = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(node_id, str) or not NODE_ID.fullmatch(node_id):
            message = f"a node's id must be letters, digits, - and _ (at most 64), not {node_id!r}"
            self.problems.append(DocumentProblem("invalid_id", message))
            return
        if node_id in self.nodes or node_id in self.broken:
            self.problems.append(DocumentProblem("repeated_id", "two nodes have this id", node_id))
            return
        fields = FieldReader(entry, self.report_for(node_id))
        fields.known.update(("id", "type", "title"))
        reader = _READERS.get(str(entry.get("type")))
        if reader is None:
            fields.take("type")
            known = ", ".join(_READERS)
            suggestion = did_you_mean(entry.get("type"), _READERS)
            fields.report("unknown_type", f"type must be one of {known}{suggestion}", "type")
            return
        node = reader(self, node_id, fields)
        if CONFIG in fields.values:
            fields.take(CONFIG)
            message = (
                "config can't be read; did you mean to put its fields next to 'id' and 'type'?"
            )
            fields.report("unknown_field", message, CONFIG)
        fields.refuse_others()
        if node_id not in self.broken:
            self.nodes[node_id] = node

    def layout(self, fields: FieldReader) -> Mapping[str, tuple[int, int]]:
        """Reads `{node: [x, y]}`. Positions of nodes that don't exist are dropped."""
        places = fields.mapping("layout")
        if not all(map(_is_place, places.values())):
            fields.wrong("layout", f"an object of [x, y], each a number up to {PLACE_MAX:,}")
            return {}
        known = (node for node in self.nodes if node in places)
        return {node: (round(places[node][0]), round(places[node][1])) for node in known}

    def connection(self, entry: Any) -> None:
        if not isinstance(entry, dict) or set(entry) != {"from", "to"}:
            message = (
                f"a connection must be an object with from and to, not {entry!r:.80}; did you mean "
                f"{_suggested_connection(entry)}?"
            )
            self.problems.append(DocumentProblem("invalid_connection", message))
            return
        source, target = read_source(entry["from"]), read_target(entry["to"])
        if source is None:
            self.unreadable("from", entry["from"], "node.port")
        if target is None:
            self.unreadable("to", entry["to"], "node.port")
        if source and target:
            self.connections.append(GraphConnection(source, target))

    def unreadable(self, end: str, value: Any, expected: str) -> None:
        message = f"{end} must be written {expected}, not {value!r:.80}{self.offered(end, value)}"
        self.problems.append(DocumentProblem("invalid_connection", message))

    def offered(self, end: str, node_id: Any) -> str:
        """Lists the ports of a node, for a connection that names the node without a port."""
        node = self.nodes.get(node_id) if isinstance(node_id, str) else None
        if node is None:
            return ""
        ports = outputs_of(node, ANY) if end == FROM else inputs_of(node)
        return f"; {node_id} has {told_names(ports)}" if ports else ""

    def input(self, node_id: str, fields: FieldReader) -> Node:
        value_type = fields.text("value_type") or "any"
        if type_named(value_type) is None:
            fields.wrong("value_type", "a type such as image, text, number or text[]")
        default = fields.take("default")
        required = fields.truth("required", default is None)
        return InputNode(node_id, value_type, required, default, self.columns(fields, value_type))

    def columns(self, fields: FieldReader, value_type: str) -> Mapping[str, str]:
        """Reads the types of a table's columns. Their names are parts of paths, so they must not
        contain dots."""
        columns, most = fields.mapping("columns"), self.limits.columns_max
        if columns and value_type not in ("any", "any[]"):
            fields.report(
                "invalid_field", "a table must have columns instead of a value_type", "columns"
            )
        is_named = all(name and "." not in name and len(name) <= 200 for name in columns)
        kinds = (*SCALARS, "any")
        if (
            len(columns) > most
            or not is_named
            or not all(kind in kinds for kind in columns.values())
        ):
            expected = f"up to {most} names without dots, each with one of {', '.join(kinds)}"
            fields.wrong("columns", expected)
            return {}
        return dict(columns)

    def workflow(self, node_id: str, fields: FieldReader) -> Node:
        limits = self.limits
        workflow, effect = read_work(fields)
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
            priority=self.priority(fields, self.settings["priority"]),
            continue_on_error=fields.truth("continue_on_error", False),
            reuse=fields.truth("reuse", self.settings["reuse"]),
        )

    def affinity(self, fields: FieldReader) -> str | None:
        affinity = fields.text("backend_affinity")
        if affinity and not AFFINITY.fullmatch(affinity):
            plain = re.sub(r"\s+", "-", affinity.strip().partition(":")[2] or affinity.strip())
            suggestion = f"; did you mean 'worker:{plain}'?"
            fields.wrong("backend_affinity", "worker:ID or fleet:SLUG/STAGE", meant=suggestion)
        return affinity or None

    def properties(self, node_id: str, fields: FieldReader) -> Mapping[str, Any]:
        """Reads properties. `{from: node.port}` in place of a value is a connection."""
        literals: dict[str, Any] = {}
        for name, value in fields.mapping("properties").items():
            if not isinstance(value, dict) or set(value) != {FROM}:
                literals[name] = self.templates(value, name, fields)
                continue
            source = read_source(value[FROM])
            if source is None:
                message = f"from must be written node.port, not {value[FROM]!r:.80}"
                fields.report("invalid_connection", message, name)
            else:
                self.connections.append(GraphConnection(source, ConnectionTarget(node_id, name)))
        return literals

    def condition(self, node_id: str, fields: FieldReader) -> Node:
        text = str(fields.values.get("condition"))
        return ConditionNode(node_id, text, self.expression(fields, "condition", (ROOT,)))

    def fanout(self, node_id: str, fields: FieldReader) -> Node:
        limits = self.limits
        mode = fields.choice("mode", FanOutMode.BROADCAST)
        per_item = fields.truth("per_item", False)
        if per_item and mode == FanOutMode.BROADCAST:
            fields.report("invalid_field", "per_item requires the mode distribute", "per_item")
        return FanOutNode(
            node_id,
            mode,
            output_count=fields.whole("output_count", 2, least=1, most=limits.fanout_outputs_max),
            per_item=per_item,
            max_items=fields.whole("max_items", 100, least=1, most=limits.fanout_items_max),
        )

    def merge(self, node_id: str, fields: FieldReader) -> Node:
        mode = fields.choice("mode", MergeMode.COLLECT)
        return MergeNode(node_id, mode, over=fields.text("over") or None)

    def output(self, node_id: str, fields: FieldReader) -> Node:
        return OutputNode(node_id)

    # Values, branches and approvals

    def templates(self, value: Any, name: str, fields: FieldReader) -> Any:
        try:
            self.count_characters(template_characters(value))
            return parse_templates(value, None)
        except FleetError as problem:
            fields.report("invalid_template", problem.message, name)
            return None

    def count_characters(self, count: int) -> None:
        """Counts characters of expressions. Raises LimitExceeded if there are too many, because
        parsing them blocks the event loop."""
        self.characters += count
        if self.characters > EXPRESSION_CHARACTERS_MAX:
            raise LimitExceeded(
                "all templates and conditions of a graph together have more than "
                f"{EXPRESSION_CHARACTERS_MAX:,} characters"
            )

    def values(self, name: str, fields: FieldReader) -> Mapping[str, Any]:
        """Reads values by name. `{from: node.port}` is short for a template that contains only this
        path."""
        result: dict[str, Any] = {}
        for key, value in fields.mapping(name).items():
            if not NODE_ID.fullmatch(key):
                message = f"a name must be letters, digits, - and _ (at most 64), not {key!r:.60}"
                fields.report("invalid_field", message, name)
            is_source = isinstance(value, dict) and set(value) == {FROM}
            written = f"{{{{ {value[FROM]} }}}}" if is_source else value
            result[key] = self.templates(written, key, fields)
        return result

    def value(self, node_id: str, fields: FieldReader) -> Node:
        values = self.values("values", fields)
        if not values or OUTPUTS_PORT in values:
            message = f"values must be an object with at least one value, and without the name {OUTPUTS_PORT}"
            fields.report("invalid_field", message, "values")
        return ValueNode(node_id, values)

    def expression(self, fields: FieldReader, name: str, roots: tuple[str, ...]) -> Expression:
        text = fields.values.get(name)
        try:
            self.count_characters(len(text) if isinstance(text, str) else 0)
        except LimitExceeded as problem:
            fields.take(name)
            fields.report("invalid_condition", problem.message, name)
            return LiteralValue(False)
        return read_expression(fields, name, roots)

    def switch(self, node_id: str, fields: FieldReader) -> Node:
        cases: list[SwitchCase] = []
        for at, row in enumerate(self.rows(fields, "cases", self.limits.cases_max)):
            case = FieldReader(row if isinstance(row, dict) else {}, _inside(fields, f"cases.{at}"))
            name = case.text("name", required=True)
            text = str(case.values.get("when", ""))
            cases.append(SwitchCase(name, text, self.expression(case, "when", (ROOT,))))
            case.refuse_others()
            if not NODE_ID.fullmatch(name) or name == DEFAULT_PORT:
                message = f"the name of a case can't be {name!r}"
                fields.report("invalid_field", message, "cases")
        names = [case.name for case in cases]
        if not cases or len(set(names)) < len(names):
            fields.report(
                "invalid_field",
                "cases must be a list of at least one case, with different names",
                "cases",
            )
        return SwitchNode(node_id, tuple(cases))

    def approve(self, node_id: str, fields: FieldReader) -> Node:
        return ApproveNode(
            node_id,
            fields.text("message") or "Is this right?",
            pick=fields.truth("pick", False),
            deadline_seconds=fields.optional_whole(
                "deadline", least=1, most=self.limits.timeout_seconds_max
            ),
            on_deadline=fields.choice("on_deadline", DeadlineChoice.FAIL),
        )

    # Nodes that contain others

    def path(self, fields: FieldReader, name: str) -> FieldPath:
        text = fields.take(name)
        try:
            expression = parse_expression(text, None) if isinstance(text, str) else None
        except FleetError:
            expression = None
        if isinstance(expression, FieldPath):
            return expression
        message = f"{name} must refer to a value, for example input.rows or draw.output.images"
        fields.report("missing_field" if text is None else "invalid_field", message, name)
        return FieldPath(node_id_of(text))

    def body(self, node_id: str, fields: FieldReader) -> GraphBody:
        """Reads `do`: a workflow or an effect, a graph, or nodes with the `result` of an
        iteration."""
        value = fields.take("do")
        if not isinstance(value, dict):
            fields.report("missing_field", "do must be an object: a node, a graph or nodes", "do")
            return GraphBody({}, (), FieldPath("do"))
        inner = _Parser(self.limits)
        inner.settings, inner.prefix = self.settings, f"{self.prefix}{node_id}/"
        result = FieldPath("do", (OUTPUTS_PORT if "graph" in value else OUTPUT_PORT,))
        if "nodes" in value:
            result = inner.inline(value, fields)
        else:
            kind = "graph" if "graph" in value else "workflow"
            inner.node({**value, "id": "do", "type": kind})
        self.problems += inner.problems
        if inner.broken or inner.problems:
            self.broken.add(node_id)
        return GraphBody(inner.nodes, tuple(inner.connections), result)

    def inline(self, value: Mapping[str, Any], outer: FieldReader) -> FieldPath:
        fields = FieldReader(value, outer.report)
        for entry in self.rows(fields, "nodes", self.limits.nodes_max):
            self.node(entry)
        for entry in self.rows(fields, "connections", self.limits.connections_max):
            self.connection(entry)
        result = self.path(fields, "result")
        fields.refuse_others()
        for node in self.nodes.values():
            if isinstance(node, InputNode | OutputNode):
                message = "is not allowed inside another node; refer to outer values by name, and return a value with result"
                self.problems.append(
                    DocumentProblem("invalid_field", message, f"{self.prefix}{node.id}")
                )
        return result

    def written(self, fields: FieldReader) -> dict[str, Any]:
        return {name: value for name, value in fields.values.items() if name not in ("id", "type")}

    def list_fields(self, fields: FieldReader) -> dict[str, Any]:
        limits = self.limits
        return {
            "max_items": fields.whole("max_items", 100, least=1, most=limits.fanout_items_max),
            "at_once": fields.optional_whole("at_once", least=1, most=limits.at_once_max),
        }

    def map(self, node_id: str, fields: FieldReader) -> Node:
        return MapNode(
            node_id,
            self.written(fields),
            self.path(fields, "over"),
            self.body(node_id, fields),
            continue_on_error=fields.truth("continue_on_error", False),
            **self.list_fields(fields),
        )

    def loop(self, node_id: str, fields: FieldReader) -> Node:
        at_most = fields.whole("at_most", 1, least=1, most=self.limits.rounds_max)
        if "at_most" not in fields.values:
            fields.report(
                "missing_field",
                "at_most is missing; set it to the maximum number of rounds",
                "at_most",
            )
        best = fields.values.get("best")
        return LoopNode(
            node_id,
            self.written(fields),
            self.values("start", fields),
            self.body(node_id, fields),
            self.expression(fields, "until", LOOP_ROOTS),
            at_most,
            self.expression(fields, "best", LOOP_ROOTS) if best is not None else None,
        )

    def subgraph(self, node_id: str, fields: FieldReader) -> Node:
        graph = fields.text("graph", required=True)
        if "version" not in fields.values:
            fields.report(
                "missing_field", "version is missing; a nested graph has a fixed version", "version"
            )
        version = fields.whole("version", 1, least=1, most=2**31 - 1)
        inputs = self.values("inputs", fields)
        return SubgraphNode(node_id, self.written(fields), graph, version, inputs)

    def score(self, node_id: str, fields: FieldReader) -> Node:
        judge = read_judge(fields, ("workflow", "effect", "version", "reuse"))
        work = dict(judge.work)
        work["properties"] = {**work["properties"], judge.into: "{{ item }}"}
        body = self.body(node_id, FieldReader({"do": work}, fields.report))
        return ScoreNode(
            node_id,
            self.written(fields),
            self.path(fields, "over"),
            body,
            judge.score,
            fields.optional_whole("keep", least=1, most=self.limits.fanout_items_max),
            **self.list_fields(fields),
        )


LOOP_ROOTS = (ROOT, "previous", "round")


def _inside(fields: FieldReader, place: str) -> Callable[[str, str, str], None]:
    """Returns a report function for the fields of a row, which are reported with their position,
    such as `cases.0.when`."""
    return lambda code, message, field: fields.report(code, message, f"{place}.{field}")


def node_id_of(text: Any) -> str:
    return text if isinstance(text, str) and NODE_ID.fullmatch(text) else "nothing"


_READERS: Mapping[str, Callable[[_Parser, str, FieldReader], Node]] = {
    "input": _Parser.input,
    "workflow": _Parser.workflow,
    "condition": _Parser.condition,
    "fanout": _Parser.fanout,
    "merge": _Parser.merge,
    "output": _Parser.output,
    "value": _Parser.value,
    "switch": _Parser.switch,
    "approve": _Parser.approve,
    "map": _Parser.map,
    "loop": _Parser.loop,
    "graph": _Parser.subgraph,
    "score": _Parser.score,
}


def _is_place(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(isinstance(number, int | float) and abs(number) <= PLACE_MAX for number in value)
    )


EXAMPLE_CONNECTION = {"from": "node.port", "to": "node.port"}
# How other tools name the ends of a connection and their ports.
OTHER_ENDS = {
    "from": (("source", "source_node", "source_id"), ("source_port", "sourceHandle")),
    "to": (("target", "target_node", "target_id"), ("target_port", "targetHandle")),
}


def _suggested_connection(entry: Any) -> str:
    """Converts a connection from another tool's format to ours. Returns an example if that fails."""
    values = entry if isinstance(entry, dict) else {}
    ends = {end: _suggested_end(values, *names) for end, names in OTHER_ENDS.items()}
    return json.dumps(ends if all(ends.values()) else EXAMPLE_CONNECTION)


def _suggested_end(
    values: Mapping[str, Any], nodes: Collection[str], ports: Collection[str]
) -> str:
    """Returns an end of a connection as `node.port`, or only the node. Returns "" if the node is
    missing."""
    node, port = (
        next((value for name in names if isinstance(value := values.get(name), str)), "")
        for names in (nodes, ports)
    )
    return f"{node}.{port}"[:ENDS_CHARACTERS_MAX].rstrip(".") if node else ""


def read_work(fields: FieldReader) -> tuple[str, str | None]:
    """Reads the workflow or the effect of a node. It must have exactly one of them."""
    if isinstance(fields.take("workflow"), dict):
        message = (
            "workflow must be the name of a registered workflow, not a workflow itself; "
            "register it first: comfyfleet admin workflows register NAME FILE"
        )
        fields.report("invalid_field", message, "workflow")
        fields.take("effect")
        return "", None
    workflow, effect = fields.text("workflow"), fields.text("effect")
    if workflow and effect:
        fields.report("invalid_field", "name an effect or a workflow, not both", "effect")
    elif not workflow and not effect and not {"workflow", "effect"} & set(fields.values):
        fields.report("missing_field", "effect or workflow is missing", "workflow")
    return workflow, effect or None


def read_expression(fields: FieldReader, name: str, roots: tuple[str, ...]) -> Expression:
    text = fields.take(name)
    if not isinstance(text, str):
        fields.report("missing_field", f"{name} must be text", name)
        return LiteralValue(False)
    try:
        return parse_condition(text, roots)
    except FleetError as problem:
        fields.report("invalid_condition", problem.message, name)
        return LiteralValue(False)


class JudgeFields(NamedTuple):
    work: Mapping[str, Any]  # effect or workflow and version, with its properties
    into: str  # the property that takes the image
    score: Expression
    measure: str = ""


def read_judge(fields: FieldReader, work_fields: tuple[str, ...]) -> JudgeFields:
    """Reads a judge. The field `measure` sets the property `measure`. It also selects the workflow
    named `measure`, unless the judge names its own workflow."""
    measure, into = fields.text("measure"), fields.text("property") or "image"
    own = {name: fields.take(name) for name in work_fields}
    work = {name: value for name, value in own.items() if value is not None}
    properties = dict(fields.mapping("properties"))
    if measure:
        work.setdefault("workflow", "measure")
        properties["measure"] = measure
    has_score = fields.take("score") is not None
    score = read_expression(fields, "score", (ROOT,)) if has_score else FieldPath(ROOT, ("json",))
    return JudgeFields({**work, "properties": properties}, into, score, measure)


def read_version(fields: FieldReader) -> int | None:
    if fields.take("version", LATEST) == LATEST:
        return None
    if fields.values.get("effect") is not None:
        fields.report(
            "invalid_field", "an effect has no versions, so version can't be set", "version"
        )
    return fields.whole("version", 1, least=1, most=2**31 - 1)


def read_source(text: Any) -> ConnectionSource | None:
    parts = text.split(".") if isinstance(text, str) else []
    if len(parts) < 2 or not all(parts):
        return None
    return ConnectionSource(parts[0], parts[1], tuple(parts[2:]))


def read_target(text: Any) -> ConnectionTarget | None:
    node, dot, port = text.partition(".") if isinstance(text, str) else ("", "", "")
    return ConnectionTarget(node, port) if dot and node and port else None


def write_graph(graph: GraphDefinition) -> dict[str, Any]:
    """Returns the document that `parse_graph` reads as this graph."""
    document: dict[str, Any] = {"name": graph.name}
    if graph.max_tokens is not None:
        document["max_tokens"] = graph.max_tokens
    document |= _given(
        reuse=graph.reuse or None,
        priority=graph.priority or None,
        at_once=graph.at_once,
        deadline=graph.deadline_seconds,
    )
    document["nodes"] = [
        {"id": node.id, "type": kind_of(node), **_fields(node), **_unlike_graph(node, graph)}
        for node in graph.nodes.values()
    ]
    document["connections"] = [
        {"from": str(connection.source), "to": str(connection.target)}
        for connection in graph.connections
    ]
    if graph.layout:
        document["layout"] = {node: list(place) for node, place in graph.layout.items()}
    return document


def _fields(node: Node) -> dict[str, Any]:
    match node:
        case InputNode():
            return _given(
                value_type=node.value_type,
                required=node.required,
                default=node.default,
                columns=dict(node.columns) or None,
            )
        case WorkflowNode():
            return _workflow(node)
        case ConditionNode():
            return {"condition": node.text}
        case FanOutNode():
            return _fanout(node)
        case MergeNode():
            return _given(mode=node.mode.value, over=node.over)
        case MapNode() | LoopNode() | SubgraphNode() | ScoreNode():
            return dict(node.document)
    return _more_fields(node)


def _more_fields(node: Node) -> dict[str, Any]:
    match node:
        case ValueNode():
            return {"values": write_templates(node.values)}
        case SwitchNode():
            return {"cases": [{"name": case.name, "when": case.text} for case in node.cases]}
        case ApproveNode():
            return _given(
                message=node.message,
                pick=node.pick or None,
                deadline=node.deadline_seconds,
                on_deadline=node.on_deadline.value,
            )
    return {}


def _workflow(node: WorkflowNode) -> dict[str, Any]:
    return _given(
        workflow=node.workflow or None,
        effect=node.effect,
        version=node.version,
        properties=write_templates(node.properties) or None,
        backend_affinity=node.backend_affinity,
        fallback_strategy=node.fallback_strategy.value,
        timeout=node.timeout_seconds,
        retries=node.retries or None,
        continue_on_error=node.continue_on_error or None,
    )


def _unlike_graph(node: Node, graph: GraphDefinition) -> dict[str, Any]:
    """Returns the settings of a node that differ from the graph's."""
    if not isinstance(node, WorkflowNode):
        return {}
    return {
        name: getattr(node, name)
        for name in ("priority", "reuse")
        if getattr(node, name) != getattr(graph, name)
    }


def _fanout(node: FanOutNode) -> dict[str, Any]:
    return _given(
        mode=node.mode.value,
        output_count=node.output_count,
        per_item=node.per_item or None,
        max_items=node.max_items,
    )


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
