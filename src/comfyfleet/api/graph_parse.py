"""Parses JSON and YAML documents to graphs, reporting every problem at once, and writes graphs as documents.

A text from outside may be huge, deep, or small and unfold into something huge (YAML's aliases), so all three
are bounded before anything walks the result. A field that can't be used is reported and read as its default."""

import json
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import yaml

from comfyfleet.api.graph_conditions import LiteralValue, parse_condition
from comfyfleet.api.graph_model import (
    DEFAULT_LIMITS,
    ConditionNode,
    ConnectionSource,
    ConnectionTarget,
    DocumentProblem,
    Fallback,
    FanOutMode,
    FanOutNode,
    GraphConnection,
    GraphDefinition,
    GraphLimits,
    InputNode,
    MergeMode,
    MergeNode,
    Node,
    OutputNode,
    WorkflowNode,
    kind_of,
    type_named,
)
from comfyfleet.api.values import problem_with_text
from comfyfleet.errors import FleetError, InvalidInput, LimitExceeded

JSON_CHARACTERS_MAX = 1_000_000
YAML_CHARACTERS_MAX = 32_000  # its reader is slow; what is longer can be sent as JSON
DEPTH_MAX = 50
VALUES_MAX = 100_000  # after every alias has been followed


def read_document(text: str) -> Any:
    """Parses a JSON or YAML text; JSON if it begins like JSON."""
    is_json = text.lstrip("\ufeff \t\r\n")[:1] in ("{", "[")
    most = JSON_CHARACTERS_MAX if is_json else YAML_CHARACTERS_MAX
    if len(text) > most:
        raise LimitExceeded(f"the document is longer than {most:,} characters")
    try:
        value = _read_json(text) if is_json else _read_yaml(text)
    except RecursionError:
        raise LimitExceeded(f"the document is nested deeper than {DEPTH_MAX} levels") from None
    _check_size(value)
    return value


def _read_json(text: str) -> Any:
    """Parses JSON; a text that begins with a bracket may still be YAML in its flow style."""
    try:
        return json.loads(text.lstrip("\ufeff"), object_pairs_hook=_unique)
    except json.JSONDecodeError as problem:
        if len(text) > YAML_CHARACTERS_MAX:
            raise _unreadable(problem.msg, problem.lineno, problem.colno) from None
        return _read_yaml(text)
    except ValueError as problem:  # a number with thousands of digits
        raise InvalidInput(f"the document can't be read: {problem}") from None


def _read_yaml(text: str) -> Any:
    try:
        _check_depth(text)
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader with fewer types still
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        what = problem.problem or problem.context or "it can't be read"
        raise _unreadable(
            what, mark.line + 1 if mark else 1, mark.column + 1 if mark else 1
        ) from None
    except (yaml.YAMLError, ValueError) as problem:
        raise InvalidInput(f"the document can't be read: {problem}") from None


def _check_depth(text: str) -> None:
    """Checks the depth event by event: the constructor recurses in C for each level, without any
    limit.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEPTH_MAX:
            raise LimitExceeded(f"the document is nested deeper than {DEPTH_MAX} levels")


def _unreadable(what: str, line: int, column: int) -> InvalidInput:
    message = f"the document can't be read: line {line}, column {column}: {what}"
    return InvalidInput(message, line=line, column=column)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise InvalidInput(f"the document names {key!r} twice in one place", field=key)
        found[key] = value
    return found


# By libyaml, where the package was built with it: ten times as fast, and bounded in depth.
_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Safe):  # type: ignore[misc]
    """Loads values as JSON has them: `on` stays a text, 1:30 is no number, and no key is given
    twice.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a text", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} is named twice in one place", key.start_mark
                )
            seen.add(key.value)
        return {str(key.value): self.construct_object(value, deep) for key, value in node.value}


def _resolve(tag: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


_resolve("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
_resolve("null", r"^(?:~|null|Null|NULL|)$", "~nN")
_Loader.yaml_implicit_resolvers[""] = _Loader.yaml_implicit_resolvers["n"]
_resolve("int", r"^[-+]?(?:0|[1-9][0-9]{0,30})$", "-+0123456789")
_resolve("float", r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789")


def _check_size(value: Any) -> None:
    """Counts values and depth. An alias counts as what it stands for; one that contains itself is
    infinitely deep.
    """
    count = 0
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        current, depth = waiting.pop()
        count += 1
        if depth > DEPTH_MAX:
            raise LimitExceeded(f"the document is nested deeper than {DEPTH_MAX} levels")
        if count > VALUES_MAX:
            raise LimitExceeded(f"the document holds more than {VALUES_MAX:,} values")
        _refuse_unstorable(current)
        waiting.extend((inner, depth + 1) for inner in _inside(current))


def _refuse_unstorable(value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidInput("the document has a number that is none, or too large")
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, dict) else []
    for text in texts:
        problem = problem_with_text(text)
        if problem:
            raise InvalidInput(f"the document has a text that can't be kept: {problem}")


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


Choice = TypeVar("Choice", bound=StrEnum)
# code, message, field
Report = Callable[[str, str, str], None]


class FieldReader:
    def __init__(self, values: Mapping[str, Any], report: Report) -> None:
        self.values = values
        self.report = report
        self.known: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        self.known.add(name)
        return self.values.get(name, default)

    def text(self, name: str, *, required: bool = False) -> str:
        value = self.take(name)
        if value is None:
            if required:
                self.report("missing_field", f"{name} is missing", name)
            return ""
        most = DEFAULT_LIMITS.text_characters_max
        if not isinstance(value, str) or not value or len(value) > most:
            self.wrong(name, f"a text of 1 to {most} characters")
            return ""
        return value

    def whole(self, name: str, default: int, *, least: int, most: int) -> int:
        value = self.take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.wrong(name, f"a whole number from {least:,} to {most:,}")
            return default
        return value

    def optional_whole(self, name: str, *, least: int, most: int) -> int | None:
        if self.take(name) is None:
            return None
        return self.whole(name, least, least=least, most=most)

    def truth(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            self.wrong(name, "true or false")
            return default
        return value

    def choice(self, name: str, default: Choice) -> Choice:
        value = self.take(name, default.value)
        kind = type(default)
        if value not in [each.value for each in kind]:
            self.wrong(name, "one of " + ", ".join(kind))
            return default
        return kind(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.take(name, {})
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            self.wrong(name, "an object")
            return {}
        return value

    def wrong(self, name: str, wanted: str) -> None:
        self.report(
            "invalid_field", f"{name} must be {wanted}, not {_shown(self.values[name])}", name
        )

    def refuse_others(self) -> None:
        """Reports the fields that were not read, most likely misspelt; to be called last."""
        words = ", ".join(sorted(self.known))
        for name in self.values:
            if name not in self.known:
                message = f"there is no field {name!r:.60} here; there are {words}"
                self.report("unknown_field", message, str(name))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
AFFINITY = re.compile(r"worker:[^\s:]\S{0,199}|fleet:[a-z0-9_-]+/[a-z0-9_-]+")
FROM, LATEST = "from", "latest"
TOKENS_MAX = 2**53


class ParsedGraph(NamedTuple):
    """A graph and the problems found; `broken` are ids of nodes that could not be read and were
    reported.
    """

    graph: GraphDefinition
    problems: tuple[DocumentProblem, ...] = ()
    broken: frozenset[str] = frozenset()


def parse_graph_text(text: str, limits: GraphLimits = DEFAULT_LIMITS) -> ParsedGraph:
    return parse_graph(read_document(text), limits)


def parse_graph(document: Any, limits: GraphLimits = DEFAULT_LIMITS) -> ParsedGraph:
    return _Parser(limits).graph(document)


class _Parser:
    def __init__(self, limits: GraphLimits) -> None:
        self.limits = limits
        self.problems: list[DocumentProblem] = []
        self.nodes: dict[str, Node] = {}
        self.broken: set[str] = set()
        self.connections: list[GraphConnection] = []

    def graph(self, document: Any) -> ParsedGraph:
        if not isinstance(document, dict):
            self.problems.append(DocumentProblem("invalid_document", "a graph must be an object"))
            return ParsedGraph(GraphDefinition("", {}, ()), tuple(self.problems))
        fields = FieldReader(document, self.report_for(""))
        name = fields.text("name", required=True)
        max_tokens = fields.optional_whole("max_tokens", least=0, most=TOKENS_MAX)
        for entry in self.rows(fields, "nodes", self.limits.nodes_max):
            self.node(entry)
        for entry in self.rows(fields, "connections", self.limits.connections_max):
            self.connection(entry)
        fields.refuse_others()
        graph = GraphDefinition(name, self.nodes, tuple(self.connections), max_tokens)
        return ParsedGraph(graph, tuple(self.problems), frozenset(self.broken))

    def report_for(self, node: str) -> Callable[[str, str, str], None]:
        def report(code: str, message: str, field: str) -> None:
            self.problems.append(DocumentProblem(code, message, node, field if node else ""))
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
            fields.report("unknown_type", f"type must be one of {known}", "type")
            return
        node = reader(self, node_id, fields)
        fields.refuse_others()
        if node_id not in self.broken:
            self.nodes[node_id] = node

    def connection(self, entry: Any) -> None:
        if not isinstance(entry, dict) or set(entry) != {"from", "to"}:
            message = f"a connection must be an object with from and to, not {entry!r:.80}"
            self.problems.append(DocumentProblem("invalid_connection", message))
            return
        source, target = read_source(entry["from"]), read_target(entry["to"])
        if source is None:
            self.unreadable("from", entry["from"], "node.port")
        if target is None:
            self.unreadable("to", entry["to"], "node.port")
        if source and target:
            self.connections.append(GraphConnection(source, target))

    def unreadable(self, end: str, value: Any, wanted: str) -> None:
        message = f"{end} must be written {wanted}, not {value!r:.80}"
        self.problems.append(DocumentProblem("invalid_connection", message))

    def input(self, node_id: str, fields: FieldReader) -> Node:
        value_type = fields.text("value_type") or "any"
        if type_named(value_type) is None:
            fields.wrong("value_type", "a type as image, text, number or text[]")
        default = fields.take("default")
        required = fields.truth("required", default is None)
        return InputNode(node_id, value_type, required, default)

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
            priority=fields.whole(
                "priority", 0, least=-limits.priority_max, most=limits.priority_max
            ),
            continue_on_error=fields.truth("continue_on_error", False),
        )

    def affinity(self, fields: FieldReader) -> str | None:
        affinity = fields.text("backend_affinity")
        if affinity and not AFFINITY.fullmatch(affinity):
            fields.wrong("backend_affinity", "worker:ID or fleet:SLUG/STAGE")
        return affinity or None

    def properties(self, node_id: str, fields: FieldReader) -> Mapping[str, Any]:
        """Reads properties; `{from: node.port}` in place of a value is a connection."""
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
                self.connections.append(GraphConnection(source, ConnectionTarget(node_id, name)))
        return literals

    def condition(self, node_id: str, fields: FieldReader) -> Node:
        fields.known.add("condition")
        text = fields.values.get("condition")
        if not isinstance(text, str):
            fields.report("missing_field", "condition must be a text", "condition")
            return ConditionNode(node_id, "", LiteralValue(False))
        try:
            return ConditionNode(node_id, text, parse_condition(text))
        except FleetError as problem:
            fields.report("invalid_condition", problem.message, "condition")
            return ConditionNode(node_id, text, LiteralValue(False))

    def fanout(self, node_id: str, fields: FieldReader) -> Node:
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

    def merge(self, node_id: str, fields: FieldReader) -> Node:
        mode = fields.choice("mode", MergeMode.COLLECT)
        return MergeNode(node_id, mode, over=fields.text("over") or None)

    def output(self, node_id: str, fields: FieldReader) -> Node:
        return OutputNode(node_id)


_READERS: Mapping[str, Callable[[_Parser, str, FieldReader], Node]] = {
    "input": _Parser.input,
    "workflow": _Parser.workflow,
    "condition": _Parser.condition,
    "fanout": _Parser.fanout,
    "merge": _Parser.merge,
    "output": _Parser.output,
}


def read_work(fields: FieldReader) -> tuple[str, str | None]:
    """Reads the workflow or the effect that a node names: one of the two."""
    workflow, effect = fields.text("workflow"), fields.text("effect")
    if workflow and effect:
        fields.report("invalid_field", "name an effect or a workflow, not both", "effect")
    elif not workflow and not effect and not {"workflow", "effect"} & set(fields.values):
        fields.report("missing_field", "effect or workflow is missing", "workflow")
    return workflow, effect or None


def read_version(fields: FieldReader) -> int | None:
    if fields.take("version", LATEST) == LATEST:
        return None
    if fields.values.get("effect") is not None:
        fields.report("invalid_field", "an effect has no versions to choose from", "version")
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
    """Writes the document that `parse_graph` reads as this graph."""
    document: dict[str, Any] = {"name": graph.name}
    if graph.max_tokens is not None:
        document["max_tokens"] = graph.max_tokens
    document["nodes"] = [
        {"id": node.id, "type": kind_of(node), **_fields(node)} for node in graph.nodes.values()
    ]
    document["connections"] = [
        {"from": str(each.source), "to": str(each.target)} for each in graph.connections
    ]
    return document


def _fields(node: Node) -> dict[str, Any]:
    match node:
        case InputNode():
            return _given(value_type=node.value_type, required=node.required, default=node.default)
        case WorkflowNode():
            return _workflow(node)
        case ConditionNode():
            return {"condition": node.text}
        case FanOutNode():
            return _fanout(node)
        case MergeNode():
            return _given(mode=node.mode.value, over=node.over)
    return {}


def _workflow(node: WorkflowNode) -> dict[str, Any]:
    return _given(
        workflow=node.workflow or None,
        effect=node.effect,
        version=node.version,
        properties=dict(node.properties) or None,
        backend_affinity=node.backend_affinity,
        fallback_strategy=node.fallback_strategy.value,
        timeout=node.timeout_seconds,
        retries=node.retries or None,
        priority=node.priority or None,
        continue_on_error=node.continue_on_error or None,
    )


def _fanout(node: FanOutNode) -> dict[str, Any]:
    return _given(
        mode=node.mode.value,
        output_count=node.output_count,
        per_item=node.per_item or None,
        max_items=node.max_items,
    )


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
