"""Reads fields of JSON responses, and raises UnexpectedAnswer with the received text if they are
malformed. Also reads a server's reasons for refusing a prompt, node by node."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comfyfleet.errors import PromptRefused, UnexpectedAnswer

RECEIVED_CHARS_MAX = 500


def unexpected_answer(what: str, received: object) -> UnexpectedAnswer:
    shown = shorten(received)
    return UnexpectedAnswer(f"{what}; received {shown}", received=shown)


def shorten(received: object) -> str:
    text = received if isinstance(received, str) else repr(received)
    if len(text) <= RECEIVED_CHARS_MAX:
        return text
    return f"{text[:RECEIVED_CHARS_MAX]}… ({len(text)} characters)"


def parse_json(text: str | bytes, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise unexpected_answer(f"{what} is not JSON", text) from error


def mapping_in(value: object, what: str) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    raise unexpected_answer(f"{what} should be an object", value)


def list_in(value: object, what: str) -> Sequence[Any]:
    if isinstance(value, list):
        return value
    raise unexpected_answer(f"{what} should be a list", value)


def mapping_at(data: Mapping[str, Any], key: str, what: str) -> Mapping[str, Any]:
    value = data.get(key)
    if isinstance(value, dict):
        return value
    raise unexpected_answer(f"{what} should have an object {key!r}", dict(data))


def text_at(data: Mapping[str, Any], key: str, what: str) -> str:
    value = data.get(key)
    if isinstance(value, str):
        return value
    raise unexpected_answer(f"{what} should have a string {key!r}", dict(data))


def number_at(data: Mapping[str, Any], key: str, what: str) -> float:
    value = data.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise unexpected_answer(f"{what} should have a number {key!r}", dict(data))


def texts_at(data: Mapping[str, Any], key: str, what: str) -> tuple[str, ...]:
    items = list_in(data.get(key), f"{key!r} of {what}")
    if all(isinstance(item, str) for item in items):
        return tuple(items)
    raise unexpected_answer(f"{key!r} of {what} should contain strings", items)


ALLOWED_SHOWN_MAX = 20
PROBLEMS_SHOWN_MAX = 20


@dataclass(frozen=True, slots=True)
class NodeProblem:
    """A single problem of a node.

    `allowed` describes the valid values. It is empty if the server doesn't provide them.
    """

    node_id: str
    title: str
    class_type: str
    kind: str
    message: str
    details: str = ""
    input_name: str | None = None
    received: Any = None
    allowed: str = ""

    def __str__(self) -> str:
        node = f"node {self.node_id} ({self.title})" if self.title else f"node {self.node_id}"
        place = f"{node}, input {self.input_name}" if self.input_name else node
        text = f"{place}: {self.message}"
        if self.received is not None:
            text += f"; received {self.received!r}"
        if self.allowed:
            return f"{text}; allowed: {self.allowed}"
        return f"{text} ({self.details})" if self.details else text


def refusal_from(answer: Mapping[str, Any], prompt: Mapping[str, Any]) -> PromptRefused:
    """Builds PromptRefused from the body of a 400, or of a 200 that lists node errors because only
    part of the prompt would run."""
    problems = tuple(_problems(answer.get("node_errors") or {}, prompt))
    error = answer.get("error")
    if isinstance(error, dict) and not problems:
        problems = tuple(_of_prompt(error, prompt))
    headline = _headline(error, problems)
    shown = [f"  {problem}" for problem in problems[:PROBLEMS_SHOWN_MAX]]
    if (more := len(problems) - len(shown)) > 0:
        shown.append(f"  … and {more} more")
    kind = error.get("type") if isinstance(error, dict) else None
    return PromptRefused(
        "\n".join([headline, *shown]),
        problems=problems,
        error=error,
        kind=kind,
        node_errors=answer.get("node_errors"),
    )


def _headline(error: object, problems: tuple[NodeProblem, ...]) -> str:
    if isinstance(error, dict):
        return str(error.get("message") or error.get("type") or "The prompt was refused")
    if isinstance(error, str):
        return error
    return f"Part of the prompt would not run: {len(problems)} problem(s)"


def _problems(node_errors: object, prompt: Mapping[str, Any]) -> Iterator[NodeProblem]:
    for node_id, entry in mapping_in(node_errors, "'node_errors'").items():
        data = mapping_in(entry, f"the errors of node {node_id}")
        class_type = str(data.get("class_type") or "")
        for item in list_in(data.get("errors"), f"the errors of node {node_id}"):
            fault = mapping_in(item, f"an error of node {node_id}")
            yield _problem(str(node_id), class_type, fault, prompt)


def _problem(
    node_id: str, class_type: str, fault: Mapping[str, Any], prompt: Mapping[str, Any]
) -> NodeProblem:
    extra = fault.get("extra_info")
    info: Mapping[str, Any] = extra if isinstance(extra, dict) else {}
    name = info.get("input_name")
    kind = str(fault.get("type") or "")
    details = str(fault.get("details") or "")
    return NodeProblem(
        node_id=node_id,
        title=_title(prompt.get(node_id)) or class_type,
        class_type=class_type,
        kind=kind,
        message=str(fault.get("message") or kind),
        details=details,
        input_name=None if name is None else str(name),
        received=info.get("received_value", info.get("received_type")),
        allowed=_allowed(kind, info.get("input_config"), details),
    )


def _of_prompt(error: Mapping[str, Any], prompt: Mapping[str, Any]) -> Iterator[NodeProblem]:
    """Yields the node problem that a server reports as an error of the whole prompt, if any.

    Servers report an unknown node type this way. Only newer servers name the node.
    """
    extra = error.get("extra_info")
    if not isinstance(extra, dict) or "node_id" not in extra:
        return
    yield NodeProblem(
        node_id=str(extra["node_id"]),
        title=str(extra.get("node_title") or _title(prompt.get(str(extra["node_id"])))),
        class_type=str(extra.get("class_type") or ""),
        kind=str(error.get("type") or ""),
        message=str(error.get("message") or ""),
        details=str(error.get("details") or ""),
    )


def _title(node: object) -> str:
    meta = node.get("_meta") if isinstance(node, Mapping) else None
    title = meta.get("title") if isinstance(meta, Mapping) else None
    return title if isinstance(title, str) else ""


def _allowed(kind: str, config: object, details: str) -> str:
    """Describes the valid values, based on the input's declaration: `[type or list, options]`."""
    if kind == "value_not_in_list" and " not in " in details:
        # The declaration in the response lacks long lists, but the details contain the choices.
        return details.split(" not in ", 1)[1]
    if not isinstance(config, list) or not config:
        return ""
    if isinstance(config[0], list):
        return ", ".join(map(str, config[0][:ALLOWED_SHOWN_MAX]))
    options = config[1] if len(config) > 1 and isinstance(config[1], dict) else {}
    return ", ".join(_bounds(str(config[0]), options))


def _bounds(kind: str, options: Mapping[str, Any]) -> Iterator[str]:
    yield kind
    if isinstance(choices := options.get("options"), list):
        yield ", ".join(map(str, choices[:ALLOWED_SHOWN_MAX]))
    if "min" in options:
        yield f"at least {options['min']}"
    if "max" in options:
        yield f"at most {options['max']}"
