from typing import Any

import pytest
from tests.unit.workflow.builders import CLASSES, node, workflow

from comfyfleet.kernel.errors import InvalidWorkflow, UnknownNodeTypes
from comfyfleet.workflow import convert, convert_with_report


def told(nodes: list[dict[str, Any]], links: list[Any] | None = None) -> dict[str, str]:
    warnings = convert_with_report(workflow(nodes, links), CLASSES).warnings
    return {warning.code: warning.message for warning in warnings}


def test_a_sound_workflow_has_no_warnings() -> None:
    nodes = [node(1, "Source", widgets_values=[64]), node(3, "SaveImage", ("images", 1), widgets_values=["x"])]  # fmt: skip
    assert told(nodes, [[1, 1, 0, 3, 0, "IMAGE"]]) == {}


def test_nodes_that_are_left_out_are_named_with_the_reason() -> None:
    found = told(
        [
            node(1, "Source", mode=2, title="My source"),
            node(2, "Invert", mode=4),
            node(3, "Gone", properties={"cnr_id": "some-pack"}),
        ]
    )
    assert found["muted"] == 'node 1 Source "My source" is left out: muted'
    assert found["bypassed"] == "node 2 Invert is left out: bypassed"
    assert "node 3 Gone is left out" in found["unknown_type"]
    assert "some-pack" in found["unknown_type"]


def test_more_or_fewer_values_than_slots_are_told() -> None:
    assert "more than the 1" in told([node(1, "Source", widgets_values=[8, 9])])["value_count"]
    assert "fewer than the 5" in told([node(1, "Sampler", widgets_values=[8])])["value_count"]


def test_values_that_the_server_would_refuse_are_told() -> None:
    found = told([node(1, "Sampler", widgets_values=[1, "fixed", 20, "heun", ""])])
    assert "node 1 Sampler › input method" in found["refused_value"]


def test_an_input_that_no_longer_exists_is_told() -> None:
    nodes = [node(1, "Source", widgets_values=[8]), node(2, "Invert", ("gone", 1))]
    assert "gone" in told(nodes, [[1, 1, 0, 2, 0, "IMAGE"]])["unknown_input"]


def test_a_link_that_is_gone_is_told() -> None:
    assert "input image: its link is gone" in told([node(2, "Invert", ("image", 7))])["lost_link"]


def test_strict_refuses_all_unknown_types_at_once() -> None:
    nodes = [
        node(1, "Gone", title="First", properties={"cnr_id": "pack-a"}),
        node(2, "Gone"),
        node(3, "AlsoGone"),
        node(4, "NotAsked", mode=2),
    ]
    with pytest.raises(UnknownNodeTypes) as refused:
        convert(workflow(nodes), CLASSES, strict=True)
    message = str(refused.value)
    assert 'Gone: node 1 "First", node 2 (node pack pack-a)' in message
    assert "AlsoGone: node 3" in message
    assert "NotAsked" not in message


def test_unknown_types_are_kept_on_request_as_the_editor_does() -> None:
    prompt = convert(
        workflow([node(1, "Gone", widgets_values=[5, {"a": 1}])]), CLASSES, unknown="keep"
    )
    assert prompt["1"]["inputs"] == {"UNKNOWN": 5, "UNKNOWN_1": '{"a":1}'}
    assert "class_type" not in prompt["1"]


def test_only_what_an_output_node_needs_is_kept_on_request() -> None:
    nodes = [node(1, "Source"), node(2, "Source"), node(3, "SaveImage", ("images", 1))]
    document = workflow(nodes, [[1, 1, 0, 3, 0, "IMAGE"]])
    assert set(convert(document, CLASSES)) == {"1", "2", "3"}
    assert set(convert(document, CLASSES, reachable_only=True)) == {"1", "3"}


def test_only_what_is_needed_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidWorkflow, match="no active output node"):
        convert(workflow([node(1, "Source")]), CLASSES, reachable_only=True)


def test_a_file_full_of_refused_values_is_told_only_in_part() -> None:
    nodes = [
        node(number, "Sampler", widgets_values=[1, "", 20, "heun", ""]) for number in range(500)
    ]
    warnings = convert_with_report(workflow(nodes), CLASSES).warnings
    assert sum(warning.code == "refused_value" for warning in warnings) == 101
