from typing import Any

import pytest

from comfyfleet.comfy.answers import PROBLEMS_SHOWN_MAX, refusal_from
from comfyfleet.errors import UnexpectedAnswer

PROMPT = {"4": {"class_type": "Loader", "inputs": {}, "_meta": {"title": "My loader"}}}


def answer(*errors: dict[str, Any], node_id: str = "4") -> dict[str, Any]:
    return {
        "error": {
            "type": "prompt_outputs_failed_validation",
            "message": "It failed",
            "details": "",
        },
        "node_errors": {node_id: {"errors": [*errors], "class_type": "Loader"}},
    }


def error(kind: str, details: str = "", **info: Any) -> dict[str, Any]:
    return {"type": kind, "message": "Not good", "details": details, "extra_info": info}


def test_a_choice_shows_what_is_allowed_even_if_the_list_was_left_out() -> None:
    fault = error(
        "value_not_in_list",
        "model: 'x' not in ['a', 'b']",
        input_name="model",
        input_config=None,
        received_value="x",
    )
    refused = refusal_from(answer(fault), PROMPT)
    assert refused.message == (
        "It failed\n  node 4 (My loader), input model: Not good; received 'x'; allowed: ['a', 'b']"
    )


def test_a_number_shows_its_bounds() -> None:
    fault = error(
        "value_bigger_than_max",
        input_name="steps",
        input_config=["INT", {"min": 1, "max": 9}],
        received_value=10,
    )
    (problem,) = refusal_from(answer(fault), PROMPT).details["problems"]
    assert (problem.received, problem.allowed) == (10, "INT, at least 1, at most 9")


def test_a_choice_of_either_style_shows_its_options() -> None:
    styles: list[Any] = [[["a", "b"], {}], ["COMBO", {"options": ["a", "b"]}]]
    shown = [
        refusal_from(answer(error("bad", input_config=style)), PROMPT)
        .details["problems"][0]
        .allowed
        for style in styles
    ]
    assert shown == ["a, b", "COMBO, a, b"]


def test_a_missing_input_is_told_with_its_details() -> None:
    fault = error("required_input_missing", "image", input_name="image")
    (problem,) = refusal_from(answer(fault), PROMPT).details["problems"]
    assert str(problem) == "node 4 (My loader), input image: Not good (image)"


def test_a_node_without_title_goes_by_its_class() -> None:
    (problem,) = refusal_from(answer(error("bad"), node_id="7"), PROMPT).details["problems"]
    assert str(problem) == "node 7 (Loader): Not good"


def test_an_unknown_class_names_the_node_where_the_server_does() -> None:
    info = {"node_id": "4", "class_type": "Loader", "node_title": "My loader"}
    refused = refusal_from({"error": error("missing_node_type", **info), "node_errors": {}}, PROMPT)
    (problem,) = refused.details["problems"]
    assert (problem.node_id, problem.title, problem.kind) == ("4", "My loader", "missing_node_type")


def test_an_older_server_names_no_node() -> None:
    body = {"error": error("invalid_prompt", "Node ID '#4'"), "node_errors": []}
    refused = refusal_from(body, PROMPT)
    assert (refused.message, refused.details["problems"]) == ("Not good", ())


def test_of_very_many_problems_only_some_are_shown() -> None:
    refused = refusal_from(answer(*[error("bad")] * 100), PROMPT)
    assert refused.message.count("\n") == PROBLEMS_SHOWN_MAX + 1
    assert refused.message.endswith("… and 80 more")
    assert len(refused.details["problems"]) == 100


@pytest.mark.parametrize("odd", [[1], {"4": 1}, {"4": {"errors": 1}}, {"4": {"errors": [1]}}])
def test_errors_of_another_shape_are_not_believed(odd: object) -> None:
    with pytest.raises(UnexpectedAnswer):
        refusal_from({"node_errors": odd}, PROMPT)
