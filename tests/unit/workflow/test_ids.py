from tests.unit.workflow.builders import node, subgraph, workflow

from comfyfleet.workflow.parse import parse
from comfyfleet.workflow.subgraphs import unique_ids


def test_an_inner_id_that_the_root_uses_is_replaced_by_the_next_free_one() -> None:
    inner = subgraph("sub", [node(1, "A"), node(2, "B")], [[1, 1, 0, 2, 0]], [], [])
    found = unique_ids(
        parse(workflow([node(1, "A")], definitions={"subgraphs": [inner]}, last_node_id=57))
    )
    definition = found.definitions["sub"]
    assert [each.id for each in definition.nodes] == ["58", "2"]
    assert definition.links[1].origin == "58"


def test_an_id_of_an_earlier_definition_is_taken_too() -> None:
    definitions = [subgraph(key, [node(5, "A")], [], [], []) for key in ("one", "two")]
    found = unique_ids(parse(workflow([], definitions={"subgraphs": definitions})))
    assert [graph.nodes[0].id for graph in found.definitions.values()] == ["5", "6"]


def test_proxies_follow_a_renamed_inner_node() -> None:
    inner = subgraph("sub", [node(1, "A")], [], [], [])
    host = node(1, "sub", properties={"proxyWidgets": [["1", "steps"]]})
    found = unique_ids(parse(workflow([host], definitions={"subgraphs": [inner]}, last_node_id=9)))
    assert found.root.nodes[0].properties["proxyWidgets"] == [["10", "steps"]]


def test_a_second_root_node_under_one_id_gets_a_new_one() -> None:
    found = unique_ids(parse(workflow([node(3, "A"), node(3, "B")])))
    assert [each.id for each in found.root.nodes] == ["3", "4"]


def test_a_workflow_whose_ids_are_unique_is_not_touched() -> None:
    parsed = parse(workflow([node(3, "A"), node(4, "B")]))
    assert unique_ids(parsed) is parsed
