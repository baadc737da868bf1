"""Reads inputs of graphs from the command line: values, files to upload, and tables."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from comfyfleet.api.graph_model import MEDIA, InputNode
from comfyfleet.api.graph_parse import parse_graph
from comfyfleet.cli.context import read_structure, read_text
from comfyfleet.cli.control_plane import ApiSession
from comfyfleet.cli.upload import upload
from comfyfleet.client import rows_from
from comfyfleet.errors import InvalidInput


def split_named(text: str, option: str = "--input", form: str = "NAME=VALUE") -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidInput(f"{option} {text} is invalid; use {form}")
    return name, value


def graph_inputs(plane: ApiSession, graph: str, assignments: tuple[str, ...]) -> dict[str, Any]:
    """Returns the inputs of a graph. All tables are read before anything is uploaded."""
    named = dict(map(split_named, assignments))
    _require_marks(plane, graph, named)
    tables: dict[str, Any] = {}
    if any(map(_is_table, named.values())):
        nodes = parse_graph(graph_document(plane, graph)).graph.nodes
        for name, text in named.items():
            node = nodes.get(name)
            if _is_table(text) and isinstance(node, InputNode) and not _takes_file(node):
                tables[name] = _table(Path(text.removeprefix("@")), node)
    return {
        name: _with_uploads(plane, tables[name]) if name in tables else _value(plane, text)
        for name, text in named.items()
    }


def _require_marks(plane: ApiSession, graph: str, named: Mapping[str, str]) -> None:
    """Raises InvalidInput if an input accepts a file and its value is a file path without the @."""
    paths = {name: text for name, text in named.items() if text[:1] != "@" and _is_file(text)}
    if not paths:
        return
    nodes = parse_graph(graph_document(plane, graph)).graph.nodes
    for name, text in paths.items():
        node = nodes.get(name)
        if isinstance(node, InputNode) and _takes_file(node):
            raise InvalidInput(
                f"--input {name}={text}: put @ before a file's path",
                hint=f"To upload it: --input {name}=@{text}",
            )


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    # a string that is too long for a path, or that contains a NUL character
    except (OSError, ValueError):
        return False


def _is_table(text: str) -> bool:
    return text.startswith("@") and Path(text).suffix.lower() in (".csv", ".jsonl", ".ndjson")


def _takes_file(node: InputNode) -> bool:
    return node.value_type.removesuffix("[]") in MEDIA


def graph_document(plane: ApiSession, graph: str) -> dict[str, Any]:
    if Path(graph).is_file():
        return read_graph(Path(graph))
    return plane.run(plane.client.graphs.get(graph)).document


def _table(path: Path, node: InputNode) -> list[Any]:
    """Returns the rows of a table. For an input that accepts a list of plain values, returns the
    cells of the only column."""
    kind = node.value_type.removesuffix("[]")
    if node.columns or kind == "any":
        return rows_from(path, node.columns)
    names = {name for row in rows_from(path) for name in row}
    if len(names) > 1:
        raise InvalidInput(
            f"{path} must have exactly one column, because {node.id} takes {node.value_type}"
        )
    return [cell for row in rows_from(path, dict.fromkeys(names, kind)) for cell in row.values()]


def _with_uploads(plane: ApiSession, table: Any) -> Any:
    if isinstance(table, Path):
        return _uploaded(plane, table)
    if isinstance(table, list):
        return [_with_uploads(plane, item) for item in table]
    if isinstance(table, dict):
        return {name: _with_uploads(plane, inner) for name, inner in table.items()}
    return table


def _value(plane: ApiSession, text: str) -> Any:
    if text.startswith("@"):
        names = [part.removeprefix("@") for part in text.split(",")]
        files = [_uploaded(plane, Path(name)) for name in names if name]
        return files if len(names) > 1 else files[0]
    return json_or_text(text)


def json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _uploaded(plane: ApiSession, path: Path) -> str:
    if not path.is_file():
        raise InvalidInput(f"file {path} was not found")
    return upload(plane, path, "videos", "uploads")


def node_lines(path: Path) -> dict[str, int]:
    """Returns the line of each node of a graph in a file. The keys are the ids used in validation
    problems."""
    lines: dict[str, int] = {}
    try:
        _collect_lines(yaml.compose(read_text(path), Loader=yaml.SafeLoader), "", lines)
    except yaml.YAMLError:  # JSON with tabs is valid as a graph, but not as YAML
        return {}
    return lines


def _collect_lines(node: yaml.Node | None, prefix: str, lines: dict[str, int]) -> None:
    fields = _fields(node)
    nodes = fields.get("nodes")
    for entry in nodes.value if isinstance(nodes, yaml.SequenceNode) else ():
        inside = _fields(entry)
        if isinstance(name := inside.get("id"), yaml.ScalarNode):
            node_id = f"{prefix}{name.value}"
            lines.setdefault(node_id, entry.start_mark.line + 1)
            if (body := inside.get("do")) is not None:
                lines.setdefault(f"{node_id}/do", body.start_mark.line + 1)
                _collect_lines(body, f"{node_id}/", lines)


def _fields(node: yaml.Node | None) -> dict[str, yaml.Node]:
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return {key.value: value for key, value in pairs if isinstance(key, yaml.ScalarNode)}


def read_graph(path: Path) -> dict[str, Any]:
    graph = read_structure(path)
    if not isinstance(graph, dict):
        raise InvalidInput(f"{path} isn't a graph")
    return graph
