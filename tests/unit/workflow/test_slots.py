"""Which link ends at which input."""

from typing import Any

from tests.unit.workflow.builders import CLASSES, node, node_class, workflow

from comfyfleet.workflow.object_info import NodeTypes
from comfyfleet.workflow.parse import parse
from comfyfleet.workflow.wire import settle_types, wire


def linked(nodes: list[dict[str, Any]], links: list[Any], **classes: Any) -> dict[str, str]:
    """Input names of node 9 → ids of the nodes that feed them."""
    graph = parse(workflow(nodes, links)).root
    wired = settle_types(wire(graph, NodeTypes({**CLASSES, **classes}), {}))
    return {slot.name: slot.link.origin for slot in wired.nodes["9"].inputs if slot.link}


def test_names_win_over_slot_numbers() -> None:
    nodes = [node(1, "Source"), node(9, "Blend", ("image", 1))]
    assert linked(nodes, [[1, 1, 0, 9, 0, "IMAGE"]]) == {"image": "1"}


def test_a_link_that_only_the_list_knows_is_put_at_its_slot() -> None:
    nodes = [node(1, "Source"), node(9, "Blend")]
    assert linked(nodes, [[1, 1, 0, 9, 1, "IMAGE"]]) == {"image": "1"}


def test_an_input_whose_link_is_gone_has_none() -> None:
    assert linked([node(9, "Blend", ("image", 5))], []) == {}


def test_an_input_that_the_class_does_not_know_keeps_its_link() -> None:
    nodes = [node(1, "Source"), node(9, "Invert", ("extra", 1))]
    assert linked(nodes, [[1, 1, 0, 9, 0, "IMAGE"]]) == {"extra": "1"}


def test_an_input_that_stood_for_a_lost_widget_goes_with_its_link() -> None:
    lost = {"name": "old", "type": "INT", "link": 1, "widget": {"name": "old"}}
    nodes = [node(1, "Source"), {**node(9, "Invert"), "inputs": [lost]}]
    assert linked(nodes, [[1, 1, 0, 9, 0, "INT"]]) == {}


def test_of_two_links_to_one_slot_the_saved_one_stays() -> None:
    nodes = [node(1, "Source"), node(2, "Source"), node(9, "Invert", ("image", 2))]
    assert linked(nodes, [[1, 1, 0, 9, 0, "IMAGE"], [2, 2, 0, 9, 0, "IMAGE"]]) == {"image": "2"}


def test_sockets_of_a_growing_group_are_linked_by_name() -> None:
    names = ["images.image0", "images.image1", "images.image2"]
    nodes = [
        *(node(number, "Source") for number in (1, 2, 3)),
        node(9, "Stack", *((name, index + 1) for index, name in enumerate(names))),
    ]
    links = [[index, index, 0, 9, index - 1, "IMAGE"] for index in (1, 2, 3)]
    assert linked(nodes, links) == dict(zip(names, "123", strict=True))


def test_a_socket_of_the_chosen_branch_is_linked_and_of_another_is_not() -> None:
    nodes = [
        node(1, "Source"),
        node(9, "Resize", ("image", None), ("mode.like", 1), widgets_values=["to", 1, 2, True]),
    ]
    link = [1, 1, 0, 9, 1, "IMAGE"]
    assert linked(nodes, [link]) == {"mode.like": "1"}
    nodes[1]["widgets_values"] = ["by", 2.0, True]
    assert linked(nodes, [link]) == {}


def test_a_link_that_does_not_fit_a_matched_type_comes_off() -> None:
    template = {"template": {"template_id": "t", "allowed_types": "*"}}
    switch = node_class(
        {"one": ["COMFY_MATCHTYPE_V3", template]}, "COMFY_MATCHTYPE_V3", output_matchtypes=["t"]
    )
    nodes = [node(1, "MaskSource"), node(2, "Switch", ("one", 1)), node(9, "Invert", ("image", 2))]
    links = [[1, 1, 0, 2, 0, "MASK"], [2, 2, 0, 9, 0, "IMAGE"]]
    assert linked(nodes, links, Switch=switch) == {}
    nodes[0]["type"] = "Source"
    assert linked(nodes, links, Switch=switch) == {"image": "2"}


def test_a_link_behind_a_reroute_that_does_not_fit_comes_off() -> None:
    nodes = [node(1, "MaskSource"), node(2, "Reroute", ("", 1)), node(9, "Invert", ("image", 2))]
    assert linked(nodes, [[1, 1, 0, 2, 0, "MASK"], [2, 2, 0, 9, 0, "IMAGE"]]) == {}
