from typing import Any

import pytest
from tests.unit.workflow.builders import CLASSES, node, node_class, workflow

from comfyfleet.errors import InvalidWorkflow, UnknownNodeTypes
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
    found = told([node(1, "Sampler", widgets_values=[8])])["value_count"]
    assert "was saved with 1 value, fewer than the 5" in found


def test_values_of_a_class_without_widgets_are_not_told() -> None:
    """The editor saves what a node such as PreviewAny showed."""
    assert told([node(1, "Invert", widgets_values=[None, None, None])]) == {}


def test_values_that_the_server_would_refuse_are_told() -> None:
    found = told([node(1, "Sampler", widgets_values=[1, "fixed", 20, "heun", ""])])
    assert "node 1 Sampler › input method" in found["refused_value"]


def test_an_input_that_no_longer_exists_is_told() -> None:
    nodes = [node(1, "Source", widgets_values=[8]), node(2, "Invert", ("gone", 1))]
    assert "gone" in told(nodes, [[1, 1, 0, 2, 0, "IMAGE"]])["unknown_input"]


def test_a_link_that_is_gone_is_told() -> None:
    assert "input image: its link was lost" in told([node(2, "Invert", ("image", 7))])["lost_link"]


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


def save(*links: tuple[str, int | None], node_id: int = 9) -> dict[str, Any]:
    return node(node_id, "SaveImage", *links, widgets_values=["x"])


def test_an_input_that_lost_its_source_is_told_by_name() -> None:
    lost = {"a muted node": node(1, "Source", mode=2), "an unknown type": node(1, "Gone")}
    for origin in lost.values():
        found = told([origin, save(("images", 1))], [[1, 1, 0, 9, 0, "IMAGE"]])
        assert found["missing_input"] == (
            "node 9 SaveImage › input images is required, but it isn't connected"
        )


def test_a_getter_without_a_setter_leaves_an_input_without_a_source() -> None:
    getter = node(1, "GetNode", widgets_values=["frames"], outputs=[{"name": "*", "type": "*"}])
    found = told([getter, save(("images", 1))], [[1, 1, 0, 9, 0, "IMAGE"]])
    assert "node 9 SaveImage › input images" in found["missing_input"]


def test_nodes_that_no_output_needs_may_lack_inputs() -> None:
    source = node(1, "Source", widgets_values=[64])
    nodes = [source, node(2, "Invert", ("image", None)), save(("images", 1))]
    assert told(nodes, [[1, 1, 0, 9, 0, "IMAGE"]]) == {}


def test_strict_refuses_inputs_without_a_source_all_at_once() -> None:
    document = workflow([save(("images", None)), save(("images", None), node_id=10)])
    with pytest.raises(InvalidWorkflow) as refused:
        convert(document, CLASSES, strict=True)
    assert [text.split(" › ")[0] for text in refused.value.details["problems"]] == [
        "node 9 SaveImage",
        "node 10 SaveImage",
    ]


def test_a_missing_subgraph_is_told_as_one() -> None:
    found = told([node(1, "0d7f34ea-6a3c-4c39-a8a5-0f1d9d7d3c55", title="Upscale")])
    assert "subgraph that the file doesn't have" in found["missing_subgraph"]
    assert "unknown_type" not in found


def primitive(*values: Any, **more: Any) -> dict[str, Any]:
    return node(1, "PrimitiveInt", outputs=[{"name": "INT", "type": "INT"}], widgets_values=list(values), **more)  # fmt: skip


def test_a_primitive_that_the_server_lacks_is_written_where_it_leads() -> None:
    source = node(2, "Source", ("size", 1), widgets_values=[64])
    document = workflow([primitive(128, "fixed"), source], [[1, 1, 0, 2, 0, "INT"]])
    result = convert_with_report(document, CLASSES, strict=True)
    assert result.prompt["2"]["inputs"] == {"size": 128}
    assert [each.code for each in result.warnings] == ["inlined"]
    kept = convert(document, CLASSES, unknown="keep")
    assert kept["2"]["inputs"]["size"] == ["1", 0]


def test_a_primitive_that_the_server_has_stays() -> None:
    classes = {**CLASSES, "PrimitiveInt": node_class({"value": ["INT", {}]}, "INT")}
    source = node(2, "Source", ("size", 1), widgets_values=[64])
    document = workflow([primitive(128, "fixed"), source], [[1, 1, 0, 2, 0, "INT"]])
    assert convert(document, classes)["2"]["inputs"]["size"] == ["1", 0]
