"""Inputs of triggers: fixed values, and paths in a webhook's body. This module does no I/O."""

import re
from collections.abc import Mapping
from typing import Any

from comfyfleet.api.graph_model import DocumentProblem
from comfyfleet.errors import InvalidInput
from comfyfleet.server.graphs.document_work import check_size

PATH_CHARACTERS_MAX, PATH_PARTS_MAX = 200, 20
BODY, IF_THERE = "body", "?"
_TEMPLATE_PATH = re.compile(r"\{\{\s*body\b")
INPUT_NAME_PROBLEMS = ("unknown_input", "missing_input")


def check_paths(inputs: Mapping[str, Any]) -> None:
    """Raises InvalidInput if a webhook's inputs contain an invalid path."""
    for name, value in inputs.items():
        if isinstance(value, str) and _TEMPLATE_PATH.search(value):
            raise InvalidInput(
                f"{name}: {value!r:.80} is a fixed text; a value from the body is written as a plain "
                "path, such as body.rows",
                field=name,
            )
        if not is_path(value):
            continue
        parts = value.removesuffix(IF_THERE).split(".")
        if len(value) > PATH_CHARACTERS_MAX or len(parts) > PATH_PARTS_MAX or not all(parts):
            raise InvalidInput(f"{name}: {value!r:.80} is not a path like body.photo", field=name)


def map_inputs(inputs: Mapping[str, Any], body: Any) -> dict[str, Any]:
    """Returns inputs with their paths replaced by values from the body.

    A string such as `body.order.photo` or `body.rows.0` is a path. A path that ends in `?` is
    optional. Any other value is used unchanged.
    """
    mapped = {}
    for name, value in inputs.items():
        if not is_path(value):
            mapped[name] = value
            continue
        path = value.removesuffix(IF_THERE)
        found, is_there = _follow(body, path.split(".")[1:])
        if is_there:
            mapped[name] = found
        elif path == value:
            raise InvalidInput(f"{name}: there is no {path} in what was sent", field=name)
    check_size(mapped)
    return mapped


def is_path(value: Any) -> bool:
    return isinstance(value, str) and (
        value.removesuffix(IF_THERE) == BODY or value.startswith(f"{BODY}.")
    )


def _follow(value: Any, parts: list[str]) -> tuple[Any, bool]:
    for part in parts:
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and _is_index(part) and int(part) < len(value):
            value = value[int(part)]
        else:
            return None, False
    return value, True


def _is_index(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) <= 6


def with_hint(problem: DocumentProblem) -> DocumentProblem:
    if problem.code in INPUT_NAME_PROBLEMS:
        return problem
    hint = "; a value from the body is written as a plain path, such as body.rows"
    return problem._replace(message=problem.message + hint)
