from typing import Any

import pytest
from tests.unit.workflow.builders import node, subgraph, workflow

from comfyfleet.errors import InvalidWorkflow, LimitExceeded
from comfyfleet.workflow.model import Limits, Link, NodeSlot
from comfyfleet.workflow.parse import parse, parse_groups


def test_links_are_read_as_lists_and_as_objects() -> None:
    as_list = parse(workflow([], [[4, 1, 0, 2, 1, "IMAGE"]]))
    fields = {"id": 4, "origin_id": 1, "origin_slot": 0, "target_id": 2, "target_slot": 1}
    as_object = parse({"version": 1, "nodes": [], "links": [{**fields, "type": "IMAGE"}]})
    assert as_list.root.links == {4: Link(4, "1", 0, "2", 1, "IMAGE")} == as_object.root.links


def test_ids_are_one_whether_written_as_number_or_text() -> None:
    parsed = parse(
        workflow([node(7, "A"), {**node(0, "A"), "id": "8"}, {**node(0, "A"), "id": 9.0}])
    )
    assert [each.id for each in parsed.root.nodes] == ["7", "8", "9"]


def test_what_a_node_lacks_gets_the_value_that_the_editor_assumes() -> None:
    (only,) = parse({"nodes": [{"id": 1, "type": "A", "mode": None, "inputs": None}]}).root.nodes
    assert (only.title, only.mode, only.inputs, only.outputs, only.values) == ("", 0, (), (), None)


def test_an_input_keeps_its_link_and_its_widget() -> None:
    saved = {"name": "n", "type": "INT", "link": 3, "widget": {"name": "n"}}
    (only,) = parse({"nodes": [{"id": 1, "type": "A", "inputs": [saved]}]}).root.nodes
    assert only.inputs == (NodeSlot("n", "INT", 3, "n"),)


def test_old_combos_have_their_choices_as_type() -> None:
    saved = {"name": "n", "type": ["a", "b"], "link": None}
    (only,) = parse({"nodes": [{"id": 1, "type": "A", "inputs": [saved]}]}).root.nodes
    assert only.inputs[0].type == "a,b"


def test_definitions_inside_definitions_come_right_behind_their_owner() -> None:
    inner = subgraph("inner", [], [], [], [])
    outer = {**subgraph("outer", [], [], [], []), "definitions": {"subgraphs": [inner]}}
    last = subgraph("last", [], [], [], [])
    parsed = parse(workflow([], definitions={"subgraphs": [outer, last]}))
    assert list(parsed.definitions) == ["outer", "inner", "last"]


def test_of_two_links_with_one_id_the_first_counts() -> None:
    parsed = parse(workflow([], [[1, 1, 0, 2, 0, "A"], [1, 3, 0, 4, 0, "B"], None]))
    assert [link.origin for link in parsed.root.links.values()] == ["1"]


def test_groups_that_are_not_well_formed_are_passed_over() -> None:
    good = {"title": "G", "bounding": [0, 1, 2, 3]}
    assert [group.title for group in parse_groups({"groups": [good, 5, {"bounding": "x"}]})] == [
        "G"
    ]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (None, "a workflow must be a JSON object, not null"),
        ({}, "no `nodes` list"),
        ({"nodes": 5}, "`nodes` must be a list, not a number"),
        ({"nodes": [7]}, "node 0: must be an object, not a number"),
        ({"nodes": [{"id": 3, "type": None}]}, "node 3: `type` must be a string, not null"),
        (
            {"nodes": [{"id": 3, "type": "A", "inputs": [1]}]},
            "node 3 A: an input must be an object",
        ),
        ({"nodes": [{"id": 3, "type": "A", "outputs": 1}]}, "node 3 A: `outputs` must be a list"),
        ({"nodes": [{"id": [], "type": "A"}]}, "an id must be a number or a string, not a list"),
        ({"nodes": [], "links": [[1, 2]]}, "link at index 0: must be a list of 6 members"),
        (
            {"nodes": [], "links": [[1, 2, "x", 3, 4]]},
            "link at index 0: the number of a link or slot",
        ),
        ({"nodes": [], "definitions": {"subgraphs": [3]}}, "subgraph definition 0 is a number"),
        (
            {"nodes": [], "definitions": {"subgraphs": [{"id": "a", "name": "Up", "nodes": [4]}]}},
            'subgraph "Up" › node 0: must be an object',
        ),
    ],
)
def test_a_document_of_another_shape_is_refused_with_its_place(document: Any, words: str) -> None:
    with pytest.raises(InvalidWorkflow) as refused:
        parse(document)
    assert words in str(refused.value)


def test_more_nodes_than_the_limit_are_refused() -> None:
    with pytest.raises(LimitExceeded, match="3 nodes"):
        parse(workflow([node(i, "A") for i in range(3)]), limits=Limits(nodes_max=2))
