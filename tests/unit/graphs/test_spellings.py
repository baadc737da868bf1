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


def test_other_spellings_are_read_and_written_as_ours() -> None:
    other, ours = parse_graph(OTHER), parse_graph(OURS)
    assert other.problems == ()
    assert other.graph == ours.graph
    assert write_graph(other.graph) == write_graph(ours.graph)
    assert with_our_spelling(OTHER) == OURS


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
        ({"type": "fanout", "config": {"mode": "x"}, "mode": "broadcast"}, "beside"),
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
