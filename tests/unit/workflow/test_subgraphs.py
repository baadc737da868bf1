from typing import Any

import pytest
from tests.unit.workflow.builders import CLASSES, node, subgraph, workflow

from comfyfleet.errors import InvalidWorkflow, LimitExceeded
from comfyfleet.workflow import Limits, convert


def sampling(**more: Any) -> dict[str, Any]:
    """A definition that takes an image and promotes `steps`, inner id 21."""
    inner = node(21, "Sampler", ("image", 1), ("steps", 2), widgets_values=[1, "fixed", 11])
    return subgraph(
        "sub",
        [{**inner, **more}],
        [[1, -10, 0, 21, 0], [2, -10, 1, 21, 2], [3, 21, 0, -20, 0]],
        [("image", "IMAGE", [1]), ("steps", "INT", [2])],
        [("out", "IMAGE", [3])],
    )


def hosted(host: dict[str, Any], *definitions: dict[str, Any]) -> dict[str, Any]:
    """Source 1 → host 10 → SaveImage 3."""
    nodes = [node(1, "Source"), host, node(3, "SaveImage", ("images", 2))]
    links = [[1, 1, 0, 10, 0, "IMAGE"], [2, 10, 0, 3, 0, "IMAGE"]]
    return workflow(nodes, links, definitions={"subgraphs": list(definitions)}, last_node_id=30)


def steps(document: dict[str, Any], key: str = "10:21") -> Any:
    return convert(document, CLASSES)[key]["inputs"]["steps"]


def test_inner_nodes_are_emitted_under_the_id_of_their_instance() -> None:
    prompt = convert(hosted(node(10, "sub", ("image", 1)), sampling()), CLASSES)
    assert set(prompt) == {"1", "3", "10:21"}
    assert prompt["10:21"]["inputs"]["image"] == ["1", 0]
    assert prompt["3"]["inputs"]["images"] == ["10:21", 0]


def test_the_value_of_the_instance_wins_over_that_of_the_inner_widget() -> None:
    assert steps(hosted(node(10, "sub", ("image", 1)), sampling())) == 11
    assert steps(hosted(node(10, "sub", ("image", 1), widgets_values=[40]), sampling())) == 40


def test_two_instances_of_one_definition_have_values_of_their_own() -> None:
    document = hosted(node(10, "sub", ("image", 1), widgets_values=[40]), sampling())
    document["nodes"].append(node(12, "sub", widgets_values=[50]))
    assert (steps(document), steps(document, "12:21")) == (40, 50)


def test_the_outermost_instance_wins() -> None:
    outer = subgraph(
        "outer",
        [node(22, "sub", ("image", 1), ("steps", 2), widgets_values=[40])],
        [[1, -10, 0, 22, 0], [2, -10, 1, 22, 1], [3, 22, 0, -20, 0]],
        [("image", "IMAGE", [1]), ("steps", "INT", [2])],
        [("out", "IMAGE", [3])],
    )
    document = hosted(node(10, "outer", ("image", 1), widgets_values=[60]), outer, sampling())
    assert steps(document, "10:22:21") == 60


@pytest.mark.parametrize(("mode", "source"), [(2, None), (4, ["1", 0])])
def test_an_inactive_instance_at_the_root_emits_nothing_inside(mode: int, source: Any) -> None:
    prompt = convert(hosted(node(10, "sub", ("image", 1), mode=mode), sampling()), CLASSES)
    assert "10:21" not in prompt
    assert prompt["3"]["inputs"].get("images") == source


def test_an_inactive_instance_deeper_down_still_emits_its_inner_nodes() -> None:
    outer = subgraph(
        "outer", [node(22, "sub", mode=2)], [[3, 22, 0, -20, 0]], [], [("out", "IMAGE", [3])]
    )
    prompt = convert(hosted(node(10, "outer"), outer, sampling()), CLASSES)
    assert "10:22:21" in prompt
    assert "images" not in prompt["3"]["inputs"]


def test_an_old_proxy_sets_the_value_of_a_promoted_widget() -> None:
    proxies = {"proxyWidgets": [["21", "steps"]]}
    host = node(10, "sub", ("image", 1), properties=proxies, widgets_values=[77])
    assert steps(hosted(host, sampling())) == 77


def test_an_old_proxy_of_a_widget_that_is_not_promoted_makes_an_input_for_it() -> None:
    proxies = {"proxyWidgets": [["21", "seed"], ["21", "steps"]]}
    host = node(10, "sub", ("image", 1), properties=proxies, widgets_values=[5, 6])
    inputs = convert(hosted(host, sampling()), CLASSES)["10:21"]["inputs"]
    assert (inputs["seed"], inputs["steps"]) == (5, 6)


def test_an_old_proxy_of_the_host_itself_goes_by_the_name_of_the_input() -> None:
    proxies = {"proxyWidgets": [["-1", "steps"]]}
    host = node(10, "sub", ("image", 1), properties=proxies, widgets_values=[88])
    assert steps(hosted(host, sampling())) == 88


def test_an_old_proxy_of_a_primitive_feeds_all_its_targets() -> None:
    definition = sampling()
    definition["nodes"] += [
        node(24, "PrimitiveNode", outputs=[{"type": "INT"}], widgets_values=[9])
    ]
    definition["nodes"][0]["inputs"].append({"name": "seed", "type": "INT", "link": 7})
    definition["links"].append(
        {
            "id": 7,
            "origin_id": 24,
            "origin_slot": 0,
            "target_id": 21,
            "target_slot": 1,
            "type": "INT",
        }
    )
    proxies = {"proxyWidgets": [["24", "value"]]}
    host = node(10, "sub", ("image", 1), properties=proxies, widgets_values=[123])
    assert convert(hosted(host, definition), CLASSES)["10:21"]["inputs"]["seed"] == 123


def test_a_definition_that_contains_itself_is_refused() -> None:
    endless = subgraph("sub", [node(21, "sub")], [], [], [])
    with pytest.raises(InvalidWorkflow, match='subgraph "Sub" contains itself'):
        convert(hosted(node(10, "sub"), endless), CLASSES)


def test_an_output_wired_straight_to_an_input_is_refused() -> None:
    straight = subgraph(
        "sub", [], [[1, -10, 0, -20, 0]], [("image", "IMAGE", [1])], [("out", "IMAGE", [1])]
    )
    with pytest.raises(InvalidWorkflow, match="linked directly to its own input"):
        convert(hosted(node(10, "sub", ("image", 1)), straight), CLASSES)


def test_too_many_levels_and_too_many_nodes_are_refused() -> None:
    levels = [
        subgraph(f"d{depth}", [node(1, f"d{depth + 1}"), node(2, f"d{depth + 1}")], [], [], [])
        for depth in range(12)
    ]
    document = workflow([node(1, "d0")], definitions={"subgraphs": levels})
    with pytest.raises(LimitExceeded, match="levels"):
        convert(document, CLASSES, limits=Limits(subgraph_depth_max=5))
    with pytest.raises(LimitExceeded, match="nodes"):
        convert(document, CLASSES, limits=Limits(nodes_max=500))
