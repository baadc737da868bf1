from typing import Any

import pytest
from tests.unit.workflow.builders import CLASSES, node, workflow

from comfyfleet.workflow import convert


def group(**more: Any) -> dict[str, Any]:
    """Sampler → Invert."""
    sampler = {
        "type": "Sampler",
        "inputs": [{"name": "image", "type": "IMAGE"}],
        "widgets_values": [1],
    }
    invert = {"type": "Invert", "inputs": [{"name": "image", "type": "IMAGE"}]}
    return {"nodes": [sampler, invert], "links": [[0, 0, 1, 0, 1, "IMAGE"]], "external": [], **more}


def grouped(instance: dict[str, Any], definition: dict[str, Any]) -> dict[str, Any]:
    nodes = [node(1, "Source"), instance, node(3, "SaveImage", ("images", 2))]
    links = [[1, 1, 0, 5, 0, "IMAGE"], [2, 5, 0, 3, 0, "IMAGE"]]
    return workflow(nodes, links, extra={"groupNodes": {"grp": definition}}, last_node_id=5)


@pytest.mark.parametrize("separator", [">", "/"])
def test_inner_nodes_get_the_next_ids_and_the_instance_the_one_after(separator: str) -> None:
    instance = node(5, f"workflow{separator}grp", ("image", 1))
    prompt = convert(grouped(instance, group()), CLASSES)
    assert set(prompt) == {"1", "3", "8:6", "8:7"}
    assert prompt["8:6"]["inputs"]["image"] == ["1", 0]
    assert prompt["8:7"]["inputs"]["image"] == ["8:6", 0]
    assert prompt["3"]["inputs"]["images"] == ["8:7", 0]


def test_the_values_of_the_group_are_handed_to_its_inner_nodes() -> None:
    values = [42, "fixed", 33, "ddim", "a cat"]
    instance = node(5, "workflow>grp", ("image", 1), widgets_values=values)
    inputs = convert(grouped(instance, group()), CLASSES)["8:6"]["inputs"]
    assert (inputs["seed"], inputs["steps"], inputs["method"]) == (42, 33, "ddim")


def test_a_muted_group_runs_all_the_same() -> None:
    instance = node(5, "workflow>grp", ("image", 1), mode=2)
    assert "8:7" in convert(grouped(instance, group()), CLASSES)


def test_an_inner_output_may_be_shown_beside_its_inner_link() -> None:
    definition = group(external=[[0, 0, "IMAGE"]])
    prompt = convert(grouped(node(5, "workflow>grp", ("image", 1)), definition), CLASSES)
    assert prompt["3"]["inputs"]["images"] == ["8:6", 0]


def test_a_group_with_a_type_that_is_not_known_stays_an_unknown_node() -> None:
    definition = group()
    definition["nodes"][1]["type"] = "Gone"
    assert set(convert(grouped(node(5, "workflow>grp"), definition), CLASSES)) == {"1", "3"}


@pytest.mark.parametrize(
    "definition",
    [
        5,
        {},
        {"nodes": [5], "links": []},
        {"nodes": [{"type": "Invert"}], "links": [[0, -1, 0, -7]]},
    ],
)
def test_an_ill_formed_group_does_no_harm(definition: Any) -> None:
    assert "1" in convert(grouped(node(5, "workflow>grp"), definition), CLASSES)
