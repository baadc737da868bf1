"""Limits of what callers send: exactly as much is accepted, and one more is refused with an error that names the limit."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from comfyfleet.api import documents, expressions, graph_parse, templates, worker
from comfyfleet.api.documents import read_document
from comfyfleet.api.expressions import StepCount, parse_condition
from comfyfleet.api.graph_parse import parse_graph
from comfyfleet.api.templates import parse_template
from comfyfleet.api.values import INLINE_CHARACTERS_MAX, WANTED_MAX
from comfyfleet.errors import FleetError
from comfyfleet.protocol.http import BodyTooLarge
from comfyfleet.protocol.payloads import PromptSubmission, RefusedPrompt
from comfyfleet.server import trigger_inputs
from comfyfleet.server.gateway import placement, prompts, userdata
from comfyfleet.server.gateway.containment import COMPARISONS_MAX
from comfyfleet.server.http import request_body
from comfyfleet.server.http.gateway import editor
from comfyfleet.server.http.gateway.userdata import LISTED_BYTES_MAX, LISTED_MAX, _rendered
from comfyfleet.server.http.public import triggers as hooks
from comfyfleet.server.http.public.auth import KEY_CHARACTERS_MAX
from comfyfleet.server.http.request_body import BodyLimits, parse
from comfyfleet.transport import ssrf


def read_json(size: int) -> None:
    read_document('["' + "x" * (size - 4) + '"]')


def read_yaml(size: int) -> None:
    read_document("- " + "x" * (size - 2))


def read_depth(depth: int) -> None:
    read_document("[" * (depth + 1) + "]" * (depth + 1))


def read_values(count: int) -> None:
    read_document(json.dumps([0] * (count - 1)))


def read_condition(size: int) -> None:
    parse_condition('"' + "x" * (size - 7) + '" == 1')


def read_template(size: int) -> None:
    parse_template("x" * size, None)


def count_steps(count: int) -> None:
    StepCount().add(count)


def read_templates(size: int) -> None:
    """A graph whose templates have so many characters."""
    long = "{{ a }}" + "x" * 90_000
    texts = [long, long, "{{ a }}" + "x" * (size - 2 * len(long) - 7)]
    values = {f"v{number}": text for number, text in enumerate(texts)}
    node = {"id": "n", "type": "value", "values": values}
    problems = parse_graph({"name": "g", "nodes": [node], "connections": []}).problems
    for problem in problems:
        if problem.code == "invalid_template":
            raise FleetError(problem.message)


def parse_values(count: int) -> None:
    parse(json.dumps([0] * count).encode())


def parse_depth(depth: int) -> None:
    parse(b"[" * depth + b"0" * (depth > 0) + b"]" * depth)


def parse_digits(count: int) -> None:
    parse(b"1" * count)


def compare(count: int) -> None:
    placement._require_comparable(count)


def submit_nodes(count: int) -> None:
    node = {"class_type": "A", "inputs": {}}
    prompt = {str(number): node for number in range(count)}
    prompts._require_small(PromptSubmission(prompt, None, {}, None))


def submit_id(size: int) -> None:
    placement._require_short_ids({"x" * size: {"class_type": "A"}})


def name_path(size: int) -> None:
    userdata.checked_path("x" * size)


def list_entries(count: int) -> None:
    _rendered([1] * count)


def list_bytes(size: int) -> None:
    _rendered(["x" * (size - 2)])


def parse_url(size: int) -> None:
    start = "https://example.com/"
    ssrf.parse_public_url(start + "x" * (size - len(start)))


def name_delivery(size: int) -> None:
    no_request: Any = None
    hooks._delivery_id(no_request, "d" * size)


def follow_parts(count: int) -> None:
    trigger_inputs.check_paths({"photo": "body" + ".a" * (count - 1)})


def follow_path(size: int) -> None:
    trigger_inputs.check_paths({"photo": "body." + "x" * (size - 5)})


LIMITS: list[tuple[Callable[[int], None], int, str]] = [
    (read_json, documents.JSON_CHARACTERS_MAX, "1,000,000 characters"),
    (read_yaml, documents.YAML_CHARACTERS_MAX, "32,000 characters"),
    (read_depth, documents.DEPTH_MAX, "50 levels"),
    (read_values, documents.VALUES_MAX, "100,000 values"),
    (read_condition, expressions.CONDITION_CHARACTERS_MAX, "2,000 characters"),
    (read_template, templates.TEMPLATE_CHARACTERS_MAX, "100,000 characters"),
    (count_steps, expressions.STEPS_MAX, f"{expressions.STEPS_MAX:,} steps"),
    (read_templates, graph_parse.EXPRESSION_CHARACTERS_MAX, "200,000 characters"),
    (parse_values, request_body.VALUES_MAX, "200,000 values"),
    (parse_depth, request_body.DEPTH_MAX, "100 levels"),
    (parse_digits, request_body.DIGITS_MAX, "too large"),
    (compare, COMPARISONS_MAX, "the limit is 500,000"),
    (submit_nodes, prompts.NODES_MAX, "10000 nodes"),
    (submit_id, placement.NODE_ID_CHARACTERS_MAX, "200 characters"),
    (name_path, userdata.PATH_CHARACTERS_MAX, "500 characters"),
    (list_entries, LISTED_MAX, "10,000 entries"),
    (list_bytes, LISTED_BYTES_MAX, "4,194,304 bytes"),
    (parse_url, ssrf.URL_CHARACTERS_MAX, "4,000 characters"),
    (name_delivery, KEY_CHARACTERS_MAX, "200 characters"),
    (follow_parts, trigger_inputs.PATH_PARTS_MAX, "is not a valid path"),
    (follow_path, trigger_inputs.PATH_CHARACTERS_MAX, "is not a valid path"),
]


@pytest.mark.parametrize(
    ("use", "most", "says"), LIMITS, ids=lambda each: getattr(each, "__name__", "")
)
def test_as_much_as_allowed_is_accepted_and_one_more_is_refused(
    use: Callable[[int], None], most: int, says: str
) -> None:
    use(most)
    with pytest.raises((FleetError, RefusedPrompt)) as refused:
        use(most + 1)
    assert says in f"{refused.value} {getattr(refused.value, 'body', '')}"


LEASE = {"dispatch_id": 1, "lease_token": "11111111-1111-4111-8111-111111111111"}
OUTPUT = {"name": "a", "size": 1}
HELD = {**LEASE, "dispatch_id": 2}


def fields_of(name: str, value: Any) -> Callable[[int], dict[str, Any]]:
    """Returns a message's field with so many of one value."""
    return lambda count: {name: value * count}


def preview_of(count: int) -> dict[str, Any]:
    return {"preview": {"base64": "x" * count}}


def file_of(count: int) -> dict[str, Any]:
    return {"outputs": [{**OUTPUT, "content": "x" * count}]}


def lacking_of(count: int) -> dict[str, Any]:
    return {"reason": "backend_lacks", "lacking": {"node_types": ["A"] * count}}


MESSAGES: list[tuple[type[BaseModel], dict[str, Any], Callable[[int], dict[str, Any]], int]] = [
    (worker.Heartbeat, LEASE, fields_of("events", [["x", {}]]), worker.RUN_EVENTS_MAX),
    (worker.Heartbeat, LEASE, fields_of("want_assets", ["a"]), WANTED_MAX),
    (worker.Heartbeat, LEASE, fields_of("want_outputs", [{"name": "a"}]), WANTED_MAX),
    (worker.Heartbeat, LEASE, preview_of, worker.PREVIEW_CHARACTERS_MAX),
    (worker.Complete, LEASE, fields_of("outputs", [OUTPUT]), WANTED_MAX),
    (worker.Complete, LEASE, file_of, INLINE_CHARACTERS_MAX),
    (worker.Fail, LEASE, fields_of("events", [["x", {}]]), worker.RUN_EVENTS_MAX),
    (worker.Requeue, LEASE, lacking_of, worker.LACKING_MAX),
    (worker.Requeue, LEASE, fields_of("reason", "x"), worker.REASON_CHARACTERS_MAX),
    (worker.Poll, {"worker_id": "w"}, fields_of("held", [HELD]), worker.HELD_MAX),
    (worker.Poll, {"worker_id": "w"}, fields_of("models_loaded", ["a"]), worker.MODELS_LOADED_MAX),
    (
        worker.Poll,
        {"worker_id": "w"},
        fields_of("providers", ["self_hosted"]),
        worker.PROVIDERS_MAX,
    ),
    (worker.Poll, {"worker_id": "w"}, fields_of("capabilities", ["a"]), worker.CAPABILITIES_MAX),
]


@pytest.mark.parametrize(("kind", "base", "fields", "most"), MESSAGES)
def test_messages_of_workers_hold_as_much_as_allowed(
    kind: type[BaseModel],
    base: dict[str, Any],
    fields: Callable[[int], dict[str, Any]],
    most: int,
) -> None:
    kind.model_validate({**base, **fields(most)})
    with pytest.raises(ValidationError, match=rf"at most {most}|more than {most:,}"):
        kind.model_validate({**base, **fields(most + 1)})


async def received(size: int, path: str, *, is_declared: bool) -> tuple[int, int]:
    """Returns the status of the response to a body of so many bytes, and how many of them were read."""
    read, statuses = 0, list[int]()
    parts: Iterator[int] = iter([size - 1, 1])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        await Response("read")(scope, receive, send)

    async def receive() -> Message:
        nonlocal read
        part = next(parts)
        read += part
        return {"type": "http.request", "body": b"x" * part, "more_body": part > 1}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = [(b"content-length", b"%d" % size)] if is_declared else []
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    await BodyLimits(app, 1_000)(scope, receive, send)
    return statuses[0], read


BODIES = {
    "/api/ai-jobs": 1_000,
    "/api/session": request_body.STRANGER_BYTES_MAX,
    "/hooks/x": request_body.STRANGER_BYTES_MAX,
    "/api/worker/poll": request_body.WORKER_BYTES_MAX,
    "/api/admin/workflows": request_body.BODY_BYTES_MAX,
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_has_as_many_bytes_as_its_path_allows(path: str) -> None:
    most = BODIES[path]
    assert await received(most, path, is_declared=True) == (200, most)
    assert await received(most + 1, path, is_declared=True) == (413, 0)
    with pytest.raises(Exception, match=f"at most {most:,} bytes"):
        await received(most + 1, path, is_declared=False)


async def test_the_form_of_a_log_in_has_8_kib() -> None:
    async def stream(size: int) -> AsyncIterator[bytes]:
        yield b"key=abc&x="
        yield b"x" * (size - 10)

    def form(size: int) -> Any:
        return SimpleNamespace(stream=lambda: stream(size))

    assert await editor._key_in_form(form(editor.LOGIN_BYTES_MAX)) == "abc"
    with pytest.raises(BodyTooLarge):
        await editor._key_in_form(form(editor.LOGIN_BYTES_MAX + 1))
