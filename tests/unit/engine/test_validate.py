"""A prompt is refused in ComfyUI's words, and what it coerces comes back as a new prompt."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from tests.support.backends.nodes import NODES, link, node_type, say
from tests.support.backends.prompts import node

from comfyfleet.engine.node import Folders, NodesInFolders
from comfyfleet.protocol.validation import PromptValidation, validate


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path, tmp_path, tmp_path)


def judge(
    prompt: Any, folders: Folders, targets: Collection[str] | None = None
) -> PromptValidation:
    return validate(prompt, nodes=NodesInFolders(NODES, folders), targets=targets)


def faults(verdict: PromptValidation, node_id: str) -> list[Any]:
    assert verdict.node_errors is not None
    return list(verdict.node_errors[node_id]["errors"])


def shown(source: dict[str, Any]) -> dict[str, Any]:
    return {"1": source, "9": node("Show", text=link("1"))}


def test_a_good_prompt_names_its_outputs(folders: Folders) -> None:
    verdict = judge(shown(node("Say", word="hi")), folders)
    assert (verdict.error, verdict.outputs, verdict.node_errors) == (None, ("9",), {})


def test_values_are_coerced_into_a_new_prompt(folders: Folders) -> None:
    prompt = shown(node("Say", word=5, times="3"))
    verdict = judge(prompt, folders)
    assert verdict.prompt["1"]["inputs"] == {"word": "5", "times": 3}
    assert prompt["1"]["inputs"] == {"word": 5, "times": "3"}


def test_a_wrapped_list_is_unwrapped_once(folders: Folders) -> None:
    prompt = shown(node("Say", word={"__value__": ["a", 1]}))
    assert judge(prompt, folders).prompt["1"]["inputs"] == {"word": "['a', 1]"}


def test_a_class_that_is_not_there_ends_the_walk(folders: Folders) -> None:
    prompt = {"3": {**node("Nope"), "_meta": {"title": "My node"}}, "9": node("Show")}
    assert judge(prompt, folders).error == {
        "type": "missing_node_type",
        "message": "Node 'My node' not found. The custom node may not be installed.",
        "details": "Node ID '#3'",
        "extra_info": {"node_id": "3", "class_type": "Nope", "node_title": "My node"},
    }


def test_a_node_without_class_is_named_by_its_id(folders: Folders) -> None:
    error = judge({"1": {"inputs": {}}}, folders).error
    assert error is not None
    assert error["message"].startswith("Node 'ID #1' has no class_type.")
    assert error["extra_info"] == {"node_id": "1", "class_type": None, "node_title": None}


@pytest.mark.parametrize("targets", [[], ["1"], ["77"]])
def test_targets_that_are_no_outputs_leave_nothing(folders: Folders, targets: list[str]) -> None:
    error = judge(shown(node("Say", word="x")), folders, targets).error
    assert error is not None
    assert error["type"] == "prompt_no_outputs"


def test_a_missing_input_of_an_output_is_in_the_details(folders: Folders) -> None:
    verdict = judge({"9": node("Show")}, folders)
    assert verdict.error is not None
    assert verdict.error["details"] == "Required input is missing: text"
    assert faults(verdict, "9")[0]["extra_info"] == {"input_name": "text"}


def test_a_fault_before_the_output_leaves_the_details_empty(folders: Folders) -> None:
    verdict = judge(shown(node("Say", word="x", times=11)), folders)
    assert verdict.error is not None
    assert verdict.error["details"] == ""
    assert verdict.node_errors == {
        "1": {
            "errors": [
                {
                    "type": "value_bigger_than_max",
                    "message": "Value 11 bigger than max of 10",
                    "details": "times",
                    "extra_info": {
                        "input_name": "times",
                        "input_config": ["INT", {"default": 1, "min": 0, "max": 10}],
                        "received_value": 11,
                    },
                }
            ],
            "dependent_outputs": ["9"],
            "class_type": "Say",
        }
    }


@pytest.mark.parametrize(
    ("source", "kind", "details"),
    [
        (node("Say", word="x", times=-1), "value_smaller_than_min", "times"),
        (node("Say", word="x", times="x"), "invalid_input_type", "times, x, invalid literal for"),
        (node("Say", word="x", times=[1]), "bad_linked_input", "times"),
        (node("Pick", word="blue"), "value_not_in_list", "word: 'blue' not in ['red', 'green']"),
        (node("Pick", word=5), "value_not_in_list", "word: 5 not in ['red', 'green']"),
        (node("Read", name="nope"), "custom_validation_failed", "name - No such file: nope"),
        (node("Read", name=7), "exception_during_inner_validation", "'int' object has no"),
        (node("Read"), "exception_during_inner_validation", "Read.VALIDATE_INPUTS() missing 1"),
        ({"class_type": "Say"}, "exception_during_inner_validation", "'inputs'"),
    ],
)
def test_each_fault_has_its_type_and_details(
    folders: Folders, source: dict[str, Any], kind: str, details: str
) -> None:
    found = faults(judge(shown(source), folders), "1")
    assert found[0]["type"] == kind
    assert found[0]["details"].startswith(details)


def test_a_link_of_the_wrong_type_names_both_types(folders: Folders) -> None:
    prompt = {"1": node("Count", value=1), "2": node("Join", left=link("1"), right="b")}
    prompt["9"] = node("Show", text=link("2"))
    (found,) = faults(judge(prompt, folders), "2")
    assert found["details"] == "left, received_type(INT) mismatch input_type(STRING)"
    assert found["extra_info"]["linked_node"] == ["1", 0]


@pytest.mark.parametrize(
    ("bad_link", "details", "kind"),
    [
        (["77", 0], "'77'", "KeyError"),
        (["1", 3], "tuple index out of range", "IndexError"),
        (["1", "0"], "tuple indices must be integers", "TypeError"),
    ],
)
def test_a_link_to_nowhere_is_an_exception_of_the_output(
    folders: Folders, bad_link: list[Any], details: str, kind: str
) -> None:
    prompt = {"1": node("Say", word="x"), "9": node("Show", text=bad_link)}
    (found,) = faults(judge(prompt, folders), "9")
    assert found["type"] == "exception_during_validation"
    assert found["details"].startswith(details)
    assert found["extra_info"]["exception_type"] == kind


def test_a_cycle_is_told_on_each_of_its_nodes(folders: Folders) -> None:
    prompt = {
        "1": node("Join", left=link("2"), right="a"),
        "2": node("Join", left=link("1"), right="b"),
        "9": node("Show", text=link("2")),
    }
    verdict = judge(prompt, folders)
    for node_id in ("1", "2"):
        (found,) = faults(verdict, node_id)
        assert found["details"] == "2 (Join) -> 1 (Join) -> 2 (Join)"
        assert found["extra_info"] == {"node_id": node_id, "cycle_nodes": ["2", "1"]}


def test_an_output_that_fails_is_left_out_and_the_others_run(folders: Folders) -> None:
    prompt = {**shown(node("Say", word="x")), "8": node("Show")}
    verdict = judge(prompt, folders)
    assert verdict.error is None
    assert verdict.outputs == ("9",)
    assert verdict.node_errors is not None
    assert verdict.node_errors["8"]["dependent_outputs"] == ["8"]


def test_a_long_list_of_choices_is_not_repeated(folders: Folders) -> None:
    many = node_type("Many", say, {"word": [[str(n) for n in range(21)], {}]})
    verdict = validate(
        shown(node("Many", word="x")), nodes=NodesInFolders({**NODES, "Many": many}, folders)
    )
    (found,) = faults(verdict, "1")
    assert found["details"] == "word: 'x' not in (list of length 21)"
    assert found["extra_info"]["input_config"] is None


def test_slots_of_a_growing_group_are_named_after_it(folders: Folders) -> None:
    template = {"input": {"required": {"v": ["STRING", {}]}}, "prefix": "v", "min": 1, "max": 3}
    grow = node_type("Grow", say, {"all": ["COMFY_AUTOGROW_V3", {"template": template}]})
    verdict = validate(shown(node("Grow")), nodes=NodesInFolders({**NODES, "Grow": grow}, folders))
    (found,) = faults(verdict, "1")
    assert (found["details"], found["extra_info"]) == ("v0", {"input_name": "all.v0"})
