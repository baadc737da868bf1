"""What a client reads of a prompt that a backend has refused."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from comfyfleet.comfy.answers import refusal_from
from comfyfleet.server.gateway.offers import OfferedNode
from comfyfleet.server.gateway.refusals import is_left_to_backend, refused
from comfyfleet.server.jobs.model import Job
from comfyfleet.server.jobs.user_messages import to_user_message
from comfyfleet.worker.failures import REFUSAL_CHARACTERS_MAX, refusal_details

PROMPT = {"2": {"class_type": "Custom", "inputs": {"photo": "a.png", "strength": 3}}}
CUSTOM = OfferedNode("Custom", {}, uploads={"photo": "image"})


def answer(details: str, **extra_info: Any) -> dict[str, Any]:
    fault = {
        "type": "custom_validation_failed",
        "message": "Custom validation failed for node",
        "details": details,
        "extra_info": extra_info,
    }
    entry = {"errors": [fault], "dependent_outputs": ["3"], "class_type": "Custom"}
    error = {
        "type": "prompt_outputs_failed_validation",
        "message": "No",
        "details": "",
        "extra_info": {},
    }
    return {"error": error, "node_errors": {"2": entry}}


def body_of(answered: dict[str, Any], *, hides: bool = False) -> dict[str, Any]:
    """The body that a client gets, by way of the worker's report and the job's row."""
    error = refusal_details(refusal_from(answered, PROMPT))
    why = to_user_message(error)
    asked = SimpleNamespace(prompt=PROMPT)
    job = SimpleNamespace(raw_error=why.raw, error_message=why.message, spec=asked)
    return refused(cast(Job, job), {"Custom": CUSTOM}, hides=hides).body


def test_it_is_the_backends_own_response() -> None:
    answered = answer("strength - 3 > 2 in /opt/ComfyUI/limits.json", input_name="strength")
    assert body_of(answered) == answered


@pytest.mark.parametrize("path", ["/opt/ComfyUI/limits.json", r"C:\ComfyUI\limits.json"])
def test_customers_who_see_no_backends_read_no_paths(path: str) -> None:
    body = body_of(answer(f"strength - 3 > 2 in {path}", input_name="strength"), hides=True)
    (error,) = body["node_errors"]["2"]["errors"]
    assert error["details"] == "strength - 3 > 2 in …"


def test_files_of_others_are_not_listed() -> None:
    files = [["theirs.png"], {}]
    body = body_of(answer("not in ['theirs.png']", input_name="photo", input_config=files))
    assert "theirs" not in json.dumps(body)
    (error,) = body["node_errors"]["2"]["errors"]
    assert error["extra_info"] == {"input_name": "photo"}


def test_a_response_that_is_too_large_comes_without_lists_of_allowed_values() -> None:
    choices = ["x" * REFUSAL_CHARACTERS_MAX]
    (error,) = body_of(answer("no", input_config=choices))["node_errors"]["2"]["errors"]
    assert (error["details"], error["extra_info"]) == ("no", {})


def test_a_response_that_cannot_be_passed_on_is_still_a_refusal() -> None:
    body = body_of(answer("x" * 60_000))
    assert body["error"]["type"] == "prompt_outputs_failed_validation"
    assert body["error"]["message"]
    assert body["node_errors"] == {}


@pytest.mark.parametrize(("kind", "is_left"), [("Custom", True), ("SaveImage", False)])
def test_only_prompts_with_custom_nodes_wait_for_a_backend(kind: str, *, is_left: bool) -> None:
    assert is_left_to_backend({"1": {"class_type": kind}}) is is_left
