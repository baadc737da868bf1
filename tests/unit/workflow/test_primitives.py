from typing import Any

import pytest
from tests.unit.workflow.builders import CLASSES, node, node_class, workflow

from comfyfleet.workflow import convert


def written(value: Any, declared: list[Any], kind: str = "INT", **more: Any) -> Any:
    """What a primitive writes into a widget that holds 1."""
    classes = {"Sink": node_class({"v": declared})}
    primitive = node(1, "PrimitiveNode", outputs=[{"type": kind}], widgets_values=[value], **more)
    nodes = [primitive, node(2, "Sink", ("v", 1), widgets_values=[1])]
    return convert(workflow(nodes, [[1, 1, 0, 2, 0, kind]]), classes)["2"]["inputs"]["v"]


@pytest.mark.parametrize(
    ("value", "options", "expected"),
    [
        (7, {}, 7),
        (7.6, {}, 8),
        (500, {"max": 100}, 100),
        (-5, {"min": 0}, 0),
        (13, {"step": 8}, 16),
        ("12", {}, 12),
        (None, {}, 0),
        ("x", {}, None),
    ],
)
def test_a_whole_number_is_brought_into_range_and_onto_its_step(
    value: Any, options: dict[str, Any], expected: Any
) -> None:
    assert written(value, ["INT", options]) == expected


@pytest.mark.parametrize(
    ("value", "options", "expected"),
    [
        (7.123456, {"step": 0.1, "max": 100.0}, 7.1),
        (7.123456, {"round": 0.01, "step": 0.01}, 7.12),
        (1.25, {"step": 0.25, "round": 0.25}, 1.3),
        (-3.3, {"step": 0.1}, 0),
        (5000.5, {"step": 0.1}, 2048),
        (7.123456, {"step": 5}, 7.123456),
    ],
)
def test_a_fraction_is_rounded_as_its_widget_does(
    value: float, options: dict[str, Any], expected: float
) -> None:
    assert written(value, ["FLOAT", options], "FLOAT") == expected


def test_it_works_even_when_muted() -> None:
    assert written(7, ["INT", {}], mode=2) == 7


def test_a_value_of_another_type_is_not_written() -> None:
    assert written(7, ["INT", {}], kind="FLOAT") == 1


def test_it_does_not_reach_through_a_reroute() -> None:
    nodes = [
        node(1, "PrimitiveNode", outputs=[{"type": "INT"}], widgets_values=[7]),
        node(2, "Reroute", ("", 1)),
        node(3, "Source", ("size", 2), widgets_values=[64]),
    ]
    links = [[1, 1, 0, 2, 0, "INT"], [2, 2, 0, 3, 0, "INT"]]
    assert convert(workflow(nodes, links), CLASSES)["3"]["inputs"]["size"] == 64


def test_choosing_a_branch_starts_it_anew() -> None:
    nodes = [
        node(
            1, "PrimitiveNode", outputs=[{"type": "COMFY_DYNAMICCOMBO_V3"}], widgets_values=["to"]
        ),
        node(2, "Resize", ("mode", 1), widgets_values=["by", 3.0, False]),
    ]
    inputs = convert(workflow(nodes, [[1, 1, 0, 2, 1, "*"]]), CLASSES)["2"]["inputs"]
    assert inputs == {"mode": "to", "mode.width": 0, "mode.height": 0, "smooth": False}
