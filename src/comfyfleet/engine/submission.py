"""What comes in as a prompt to run, read with ComfyUI's leniency and its refusals."""

import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from comfyfleet.engine.faults import Fault, fault
from comfyfleet.engine.trouble import MalformedBody
from comfyfleet.engine.validate import Prompt
from comfyfleet.kernel.errors import InvalidInput

SECRETS = ("auth_token_comfy_org", "api_key_comfy_org")
ABSENT: Final = object()

NO_PROMPT = fault("no_prompt", "No prompt provided", "No prompt provided")
INVALID_PROMPT_ID = fault(
    "invalid_prompt_id",
    "prompt_id must be a valid UUID",
    "prompt_id must be a UUID string in canonical lowercase hyphenated form; "
    "omit it to let the server generate one",
)


class RefusedPrompt(InvalidInput):
    """Nothing of the prompt will run."""

    code = "refused_prompt"

    def __init__(self, error: Fault, node_errors: Mapping[str, Any] | None = None) -> None:
        super().__init__(error["message"])
        self.body = {"error": error, "node_errors": node_errors or {}}


@dataclass(frozen=True, slots=True)
class Submission:
    """A body that holds a prompt in the right shape."""

    prompt: Prompt
    prompt_id: str | None
    extra_data: Mapping[str, Any]
    targets: Collection[str] | None


def member(body: object, name: str) -> Any:
    """`body[name]`, or ABSENT. A list or a text has no members, which is no fault by itself."""
    if isinstance(body, dict):
        return body.get(name, ABSENT)
    if isinstance(body, list | str) and name not in body:
        return ABSENT
    raise MalformedBody(f"a JSON object is expected, not {type(body).__name__}")


def read_number(body: object) -> tuple[float | None, bool]:
    """The place in the queue that the client wants, and whether it wants to be first."""
    number = member(body, "number")
    if number is ABSENT:
        return None, bool(member(body, "front")) and member(body, "front") is not ABSENT
    try:
        return float(number), False
    except (TypeError, ValueError, OverflowError) as error:
        raise MalformedBody(f"number: {error}") from error


def read_submission(body: object) -> Submission:
    prompt = member(body, "prompt")
    if prompt is ABSENT:
        raise RefusedPrompt(NO_PROMPT)
    return Submission(
        prompt_id=_read_prompt_id(member(body, "prompt_id")),
        prompt=_read_prompt(prompt),
        extra_data=_read_extra_data(body),
        targets=_read_targets(member(body, "partial_execution_targets")),
    )


def is_canonical_id(value: object) -> bool:
    """Whether it is a UUID as ComfyUI wants ids: lower case, with hyphens."""
    try:
        return isinstance(value, str) and str(uuid.UUID(value)) == value
    except ValueError:
        return False


def _read_prompt_id(value: Any) -> str | None:
    if value is ABSENT or value is None:
        return None
    if not is_canonical_id(value):
        raise RefusedPrompt(INVALID_PROMPT_ID)
    return str(value)


def _read_prompt(value: Any) -> Prompt:
    if not isinstance(value, dict):
        raise MalformedBody("prompt must be an object")
    for node_id, node in value.items():
        if not _is_node(node):
            raise MalformedBody(f"node {node_id} is no node")
    return value


def _is_node(node: object) -> bool:
    if not isinstance(node, dict) or not isinstance(node.get("inputs", {}), dict):
        return False
    named = isinstance(node.get("class_type"), str | int | float | None)
    return named and isinstance(node.get("_meta", {}), dict)


def _read_extra_data(body: object) -> Mapping[str, Any]:
    given = member(body, "extra_data")
    if given is ABSENT:
        given = {}
    if not isinstance(given, dict):
        raise MalformedBody("extra_data must be an object")
    client_id = member(body, "client_id")
    extra_data = given if client_id is ABSENT else {**given, "client_id": client_id}
    return {key: value for key, value in extra_data.items() if key not in SECRETS}


def _read_targets(value: Any) -> Collection[str] | None:
    if value is ABSENT or value is None:
        return None
    if not isinstance(value, list | dict | str):
        raise MalformedBody("partial_execution_targets must be a list")
    return value
