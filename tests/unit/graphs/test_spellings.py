"""Spellings of graph documents that are converted when they are parsed."""

from typing import Any

import pytest

from comfyfleet.api.graph_parse import parse_graph, write_graph
from comfyfleet.api.graph_spellings import with_our_spelling

OTHER: dict[str, Any] = {
    "name": "two ways",
    "nodes": [
        {"id": "photo", "type": "INPUT", "config": {"value_type": "image"}},
        {
            "id": "draw",
            "type": "WORKFLOW",
            "workflow_id": "soften",
            "backend_affinity": "gpu-1",
            "fallback_strategy": "ASK_USER",
        },
        {"id": "large", "type": "CONDITION", "config": {"expression": "output.width > 1024"}},
        {"id": "split", "type": "FANOUT", "config": {"mode": "BROADCAST", "output_count": 3}},
        {"id": "join", "type": "MERGE", "config": {"mode": "collect"}},
        {"id": "made", "type": "OUTPUT"},
    ],
    "connections": [
        {"from": "photo.value", "to": "draw.input"},
        {"from": "draw.output", "to": "large.input"},
        {"from": "large.true", "to": "split.input"},
        {"from": "split.output_0", "to": "join.input_0"},
        {"from": "join.output", "to": "made.value"},
    ],
}
OURS: dict[str, Any] = {
    **OTHER,
    "nodes": [
        {"id": "photo", "type": "input", "value_type": "image"},
        {
            "id": "draw",
            "type": "workflow",
            "workflow": "soften",
            "backend_affinity": "worker:gpu-1",
            "fallback_strategy": "ask_user",
        },
        {"id": "large", "type": "condition", "condition": "output.width > 1024"},
        {"id": "split", "type": "fanout", "mode": "broadcast", "output_count": 3},
        {"id": "join", "type": "merge", "mode": "collect"},
        {"id": "made", "type": "output"},
    ],
}


@pytest.mark.parametrize(
    ("node", "word"),
    [
        ({"type": "merge", "mode": "concat_image"}, "concat_images"),
        ({"type": "workflow", "workflow": "a", "fallback_strategy": "autoselect"}, "auto_select"),
        ({"type": "fanout", "mode": "brodcast"}, "broadcast"),
    ],
)
def test_a_misspelt_choice_is_answered_with_the_word_that_was_meant(
    node: dict[str, Any], word: str
) -> None:
    parsed = parse_graph({"name": "a", "nodes": [{"id": "a", **node}], "connections": []})
    assert parsed.problems[0].message.endswith(f"; did you mean {word!r}?")


def test_other_spellings_are_read_and_written_as_ours() -> None:
    other, ours = parse_graph(OTHER), parse_graph(OURS)
    assert other.problems == ()
    assert other.graph == ours.graph
    assert write_graph(other.graph) == write_graph(ours.graph)
    assert with_our_spelling(OTHER) == OURS


def test_connections_between_nodes_get_the_ports_that_there_are() -> None:
    nodes = [
        {"id": "photo", "type": "INPUT", "position": {"x": 10, "y": 20}},
        {"id": "one", "type": "WORKFLOW", "workflow_id": "a", "position": [30, 40]},
        {"id": "two", "type": "WORKFLOW", "workflow_id": "b"},
        {"id": "both", "type": "MERGE", "config": {"mode": "concat_images"}},
        {"id": "made", "type": "OUTPUT"},
    ]
    ends = [
        *(("photo", "one"), ("photo", "two"), ("one", "both"), ("two", "both")),
        ("both.images", "made"),
    ]
    edges = [{"from": source, "to": target} for source, target in ends]
    parsed = parse_graph({"name": "x", "nodes": nodes, "edges": edges})
    assert parsed.problems == ()
    written = write_graph(parsed.graph)
    assert written["layout"] == {"photo": [10, 20], "one": [30, 40]}
    assert [(each["from"], each["to"]) for each in written["connections"]] == [
        ("photo.value", "one.input"),
        ("photo.value", "two.input"),
        ("one.output", "both.input_0"),
        ("two.output", "both.input_1"),
        ("both.output", "made.value"),
    ]


def test_a_free_input_of_a_merge_is_used() -> None:
    nodes = [
        {"id": "a", "type": "input"},
        {"id": "b", "type": "input"},
        {"id": "both", "type": "merge"},
        {"id": "made", "type": "output"},
    ]
    ends = [("a", "both"), ("b.value", "both.input_0"), ("both", "made")]
    document = {
        "name": "x",
        "nodes": nodes,
        "connections": [{"from": source, "to": target} for source, target in ends],
    }
    targets = [each["to"] for each in with_our_spelling(document)["connections"]]
    assert targets == ["both.input_1", "both.input_0", "made.value"]


def test_a_connection_from_a_node_with_several_ports_lists_them() -> None:
    nodes = [
        {"id": "large", "type": "condition", "condition": "output.width > 9"},
        {"id": "made", "type": "output"},
    ]
    document = {"name": "x", "nodes": nodes, "connections": [{"from": "large", "to": "made"}]}
    (problem,) = parse_graph(document).problems
    assert problem.message == "from must be written node.port, not 'large'; large has true, false"


def test_our_spelling_is_not_changed() -> None:
    assert with_our_spelling(OURS) == OURS


def test_what_runs_inside_maps_and_loops_is_converted() -> None:
    inner = [{"id": "one", "type": "WORKFLOW", "workflow_id": "soften"}]
    document = {
        "name": "inside",
        "nodes": [
            {
                "id": "each",
                "type": "MAP",
                "config": {"over": "input.rows", "do": {"nodes": inner, "result": "one.output"}},
            },
            {
                "id": "again",
                "type": "LOOP",
                "at_most": 2,
                "until": "output.done",
                "start": {},
                "do": {"workflow_id": "soften"},
            },
        ],
    }
    parsed = parse_graph(document)
    assert parsed.problems == ()
    written = str(write_graph(parsed.graph))
    assert "workflow_id" not in written
    assert "WORKFLOW" not in written


def meant(node: dict[str, Any]) -> list[str]:
    problems = parse_graph({"name": "x", "nodes": [{"id": "a", **node}]}).problems
    return [each.message for each in problems if "did you mean" in each.message]


@pytest.mark.parametrize(
    ("node", "word"),
    [
        ({"type": "WORKFLOWS", "workflow": "x"}, "'workflow'"),
        ({"type": "workflow", "workflow": "x", "fallback_strategy": "ask"}, "'ask_user'"),
        ({"type": "workflow", "workflow": "x", "workflow_id": "y"}, "'workflow'"),
        ({"type": "condition", "conditon": "output.x"}, "'condition'"),
        ({"type": "workflow", "workflow": "x", "backend_affinity": "gpu 1"}, "'worker:"),
        ({"type": "fanout", "config": {"mode": "x"}, "mode": "broadcast"}, "next to"),
    ],
)
def test_a_spelling_that_is_not_accepted_names_the_accepted_one(
    node: dict[str, Any], word: str
) -> None:
    assert any(word in each for each in meant(node)), meant(node)


def test_a_connection_of_another_form_shows_ours() -> None:
    document = {"name": "x", "nodes": [], "connections": [{"source": "a.b", "target": "c.d"}]}
    (problem,) = parse_graph(document).problems
    assert "did you mean" in problem.message


@pytest.mark.parametrize(
    ("connection", "meant"),
    [
        (
            {"source": "a", "source_port": "true", "target": "b", "target_port": "input"},
            '{"from": "a.true", "to": "b.input"}',
        ),
        ({"source": "a", "target": "b", "sourceHandle": None}, '{"from": "a", "to": "b"}'),
        ({"source": 1, "target": "b"}, '{"from": "node.port", "to": "node.port"}'),
        ("a -> b", '{"from": "node.port", "to": "node.port"}'),
    ],
)
def test_a_connection_with_other_fields_is_shown_with_ours(connection: Any, meant: str) -> None:
    document = {"name": "x", "nodes": [], "connections": [connection]}
    (problem,) = parse_graph(document).problems
    assert problem.message.endswith(f"did you mean {meant}?")


def test_a_workflow_in_place_of_its_name_is_told_to_be_registered() -> None:
    node = {"id": "a", "type": "workflow", "workflow": {"1": {"class_type": "SaveImage"}}}
    (problem,) = parse_graph({"name": "x", "nodes": [node]}).problems
    assert "must be the name of a registered workflow" in problem.message
    assert "comfyfleet admin workflows register" in problem.message
