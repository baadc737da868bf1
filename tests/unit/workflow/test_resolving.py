"""Links through everything that only the editor knows."""

from typing import Any

import pytest
from tests.unit.workflow.builders import CLASSES, node, subgraph, workflow

from comfyfleet.errors import InvalidWorkflow
from comfyfleet.workflow import convert
from comfyfleet.workflow.node_inputs import Input
from comfyfleet.workflow.resolve import bypass_slot
from comfyfleet.workflow.wire import are_compatible, common_type


def chain(middle: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Source 1 → middle 2 → SaveImage 3."""
    nodes = [node(1, "Source"), middle, node(3, "SaveImage", ("images", 2))]
    return workflow(nodes, [[1, 1, 0, 2, 0, "IMAGE"], [2, 2, 0, 3, 0, "IMAGE"]], **more)


def saved_from(document: dict[str, Any]) -> Any:
    return convert(document, CLASSES)["3"]["inputs"].get("images")


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        ("IMAGE", "IMAGE", True),
        ("IMAGE", "image", True),
        ("IMAGE", "MASK", False),
        ("*", "MASK", True),
        ("", "MASK", True),
        ("IMAGE,MASK", "MASK", True),
        ("A,B", "C,D", False),
    ],
)
def test_types_fit_by_name_list_or_wildcard(one: str, other: str, fits: bool) -> None:
    assert are_compatible(one, other) is are_compatible(other, one) is fits


def test_the_common_type_is_what_all_admit() -> None:
    assert common_type(["*", "A,B", "B,C"]) == "B"
    assert common_type(["*", "*"]) == "*"
    assert common_type(["A", "B"]) is None


@pytest.mark.parametrize(
    ("inputs", "slot", "output", "wanted", "expected"),
    [
        (["MASK", "IMAGE"], 0, "IMAGE", "IMAGE", 1),
        (["IMAGE", "IMAGE"], 1, "IMAGE", "IMAGE", 1),
        (["MASK", "IMAGE,MASK"], 0, "IMAGE", "IMAGE", 1),
        (["MASK"], 0, "IMAGE", "IMAGE", None),
        (["MASK", "IMAGE"], 1, "IMAGE", "*", 1),
        (["MASK"], 1, "IMAGE", "*", 0),
        (["*", "IMAGE"], 0, "IMAGE", "IMAGE", 0),
        (["MASK", "*", "IMAGE"], 0, "IMAGE", "IMAGE", 2),
    ],
)
def test_a_bypassed_output_is_stood_in_for_by_type(
    inputs: list[str], slot: int, output: str, wanted: str, expected: int | None
) -> None:
    assert bypass_slot([Input(name, name) for name in inputs], slot, output, wanted) == expected


def test_a_bypassed_node_passes_its_fitting_input_on() -> None:
    assert saved_from(chain(node(2, "Invert", ("image", 1), mode=4))) == ["1", 0]


def test_a_muted_node_feeds_nothing() -> None:
    assert saved_from(chain(node(2, "Invert", ("image", 1), mode=2))) is None


def test_a_reroute_passes_on_and_a_muted_one_does_not() -> None:
    assert saved_from(chain(node(2, "Reroute", ("", 1)))) == ["1", 0]
    assert saved_from(chain(node(2, "Reroute", ("", 1), mode=2))) is None


def test_reroutes_in_a_circle_feed_nothing() -> None:
    nodes = [
        node(1, "Reroute", ("", 1)),
        node(2, "Reroute", ("", 2)),
        node(3, "SaveImage", ("images", 3)),
    ]
    links = [[1, 2, 0, 1, 0, "*"], [2, 1, 0, 2, 0, "*"], [3, 2, 0, 3, 0, "*"]]
    assert saved_from(workflow(nodes, links)) is None


def test_a_getter_goes_on_where_its_setter_is_fed() -> None:
    nodes = [
        node(1, "Source"),
        node(2, "SetNode", ("IMAGE", 1), widgets_values=["pic"]),
        node(4, "GetNode", widgets_values=["pic"], outputs=[{"type": "IMAGE"}]),
        node(3, "SaveImage", ("images", 2)),
    ]
    links = [[1, 1, 0, 2, 0, "IMAGE"], [2, 4, 0, 3, 0, "IMAGE"]]
    assert saved_from(workflow(nodes, links)) == ["1", 0]


def test_a_getter_inside_a_subgraph_finds_a_setter_outside() -> None:
    inner = subgraph(
        "sub", [node(9, "GetNode", widgets_values=["pic"])], [[1, 9, 0, -20, 0]], [],
        [("out", "IMAGE", [1])],
    )  # fmt: skip
    nodes = [
        node(1, "Source"),
        node(2, "SetNode", ("IMAGE", 1), widgets_values=["pic"]),
        node(4, "sub"),
        node(3, "SaveImage", ("images", 2)),
    ]
    links = [[1, 1, 0, 2, 0, "IMAGE"], [2, 4, 0, 3, 0, "IMAGE"]]
    assert saved_from(workflow(nodes, links, definitions={"subgraphs": [inner]})) == ["1", 0]


def test_a_link_from_a_node_that_is_not_there_is_refused_with_its_place() -> None:
    document = workflow([node(3, "SaveImage", ("images", 2))], [[2, 99, 0, 3, 0, "IMAGE"]])
    with pytest.raises(
        InvalidWorkflow, match=r"node 3 SaveImage › input images is linked to node 99"
    ):
        convert(document, CLASSES)


def test_bypassed_nodes_in_a_circle_are_refused() -> None:
    nodes = [
        node(1, "Invert", ("image", 1), mode=4),
        node(2, "Invert", ("image", 2), mode=4),
        node(3, "SaveImage", ("images", 3)),
    ]
    links = [[1, 2, 0, 1, 0, "IMAGE"], [2, 1, 0, 2, 0, "IMAGE"], [3, 2, 0, 3, 0, "IMAGE"]]
    with pytest.raises(InvalidWorkflow, match="form a loop"):
        convert(workflow(nodes, links), CLASSES)


def test_a_plain_circle_is_emitted_as_it_is() -> None:
    nodes = [node(1, "Invert", ("image", 1)), node(2, "Invert", ("image", 2))]
    links = [[1, 2, 0, 1, 0, "IMAGE"], [2, 1, 0, 2, 0, "IMAGE"]]
    prompt = convert(workflow(nodes, links), CLASSES)
    assert prompt["1"]["inputs"] == {"image": ["2", 0]}
    assert prompt["2"]["inputs"] == {"image": ["1", 0]}


def test_entries_come_after_those_that_feed_them() -> None:
    nodes = [
        node(3, "SaveImage", ("images", 2)),
        node(2, "Invert", ("image", 1)),
        node(1, "Source"),
    ]
    links = [[1, 1, 0, 2, 0, "IMAGE"], [2, 2, 0, 3, 0, "IMAGE"]]
    assert list(convert(workflow(nodes, links), CLASSES)) == ["1", "2", "3"]
