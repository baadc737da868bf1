"""The inputs of triggers, which are fixed values or paths in a webhook's body. This module does no
I/O."""

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
                f"{name}: {value!r:.80} is a fixed string. To use a value from the body,"
                " write a plain path such as body.rows",
                field=name,
            )
        if not is_path(value):
            continue
        parts = value.removesuffix(IF_THERE).split(".")
        if len(value) > PATH_CHARACTERS_MAX or len(parts) > PATH_PARTS_MAX or not all(parts):
            raise InvalidInput(
                f"{name}: {value!r:.80} is not a valid path; use a path such as body.photo",
                field=name,
            )


def map_inputs(inputs: Mapping[str, Any], body: Any) -> dict[str, Any]:
    """Returns the inputs with all paths replaced by values from the body.

    Strings such as `body.order.photo` or `body.rows.0` are paths. A path that ends with `?` is
    optional. All other values are used unchanged.
    """
    mapped = {}
    for name, value in inputs.items():
        if not is_path(value):
            mapped[name] = value
            continue
        path = value.removesuffix(IF_THERE)
        body_value, exists = _follow(body, path.split(".")[1:])
        if exists:
            mapped[name] = body_value
        elif path == value:
            raise InvalidInput(f"{name}: the request body has no value at {path}", field=name)
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
    hint = "; to use a value from the body, write a plain path such as body.rows"
    return problem._replace(message=problem.message + hint)
