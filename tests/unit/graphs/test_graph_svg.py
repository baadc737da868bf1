"""A graph as a picture: valid, escaped, with every kind of node and the states of a run."""

import time
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.cli.test_graph_tree import RUN
from tests.unit.graphs.builders import EXAMPLES, document, node, work

from comfyfleet.api.graph_layout import Box, Size, lay_out, layers
from comfyfleet.api.graph_parse import parse_graph, parse_graph_text
from comfyfleet.api.graph_svg import NodeMark, draw_svg, marks_of
from comfyfleet.api.graphs import GraphRunAnswer

SVG = "{http://www.w3.org/2000/svg}"
ALL_KINDS = """
name: All <kinds> & "quotes"
nodes:
  - {id: rows, type: input, columns: {prompt: text}}
  - {id: words, type: value, values: {text: "{{ rows.0.prompt | upper }}"}}
  - {id: draw, type: map, over: input.rows, do: {workflow: draw, properties: {text: "{{ item.prompt }} {{ words.text }}"}}}
  - {id: best, type: score, over: draw.output.images, measure: sharpness, keep: 2}
  - id: refine
    type: loop
    start: {picture: "{{ best.output.images.0 }}"}
    do: {workflow: sharpen, properties: {image: "{{ previous.picture }}"}}
    until: output.width < 3 AND output.width > 1
    at_most: 5
  - {id: framed, type: graph, graph: Frame & Co, version: 3, inputs: {picture: "{{ refine.output.images.0 }}"}}
  - {id: ask, type: approve, message: fine?}
  - {id: which, type: switch, cases: [{name: small, when: "output.count < 3"}]}
  - {id: is_large, type: condition, condition: "output.width > 512"}
  - {id: spread, type: fanout}
  - {id: all, type: merge}
  - {id: out, type: output}
connections:
  - {from: framed.picture, to: ask.input}
  - {from: ask.approved, to: which.input}
  - {from: which.small, to: is_large.input}
  - {from: is_large.true, to: spread.input}
  - {from: spread.output_0, to: all.input_0}
  - {from: all.output, to: out.value}
"""


def drawn(text: str, **marks: NodeMark) -> ElementTree.Element:
    parsed = parse_graph_text(text)
    assert parsed.problems == ()
    return ElementTree.fromstring(draw_svg(parsed.graph, marks))  # noqa: S314


def texts(picture: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in picture.iter(f"{SVG}text")]


def kinds(picture: ElementTree.Element) -> list[str]:
    classes = (each.get("class", "").split() for each in picture.iter(f"{SVG}g"))
    return [each[1] for each in classes if each[:1] == ["node"]]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("graphs/*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_drawn(path: Any) -> None:
    text = path.read_text("utf-8")
    told = texts(drawn(text))
    assert all(each["id"] in told for each in yaml.safe_load(text)["nodes"])


def test_every_kind_of_node_is_drawn_as_what_it_is_and_texts_are_escaped() -> None:
    picture = drawn(ALL_KINDS)
    assert sorted(set(kinds(picture))) == [
        "approve", "condition", "fanout", "graph", "input", "loop", "map", "merge", "output", "score",
        "switch", "value", "workflow",
    ]  # fmt: skip
    told = texts(picture)
    assert 'All <kinds> & "quotes"' in told
    assert "graph Frame & Co v3" in told
    assert "loop until output.width < 3 AND output.…" in told
    assert {"approved", "small", "true"} <= set(told)


def test_what_a_node_contains_is_inside_its_box() -> None:
    picture = drawn(ALL_KINDS)
    (loop,) = [
        each for each in picture.iter(f"{SVG}g") if each.get("class", "").startswith("node loop")
    ]
    inside = [each for each in loop.iter(f"{SVG}g") if "workflow" in each.get("class", "")]
    assert [each.find(f"{SVG}text").text for each in inside] == ["do"]  # type: ignore[union-attr]


def test_templates_are_arrows_too() -> None:
    picture = drawn(ALL_KINDS)
    edges = [each for each in picture.iter(f"{SVG}path") if each.get("class") == "edge"]
    # rows → words, rows → draw, words → draw, draw → best, best → refine, refine → framed, and 6 wires
    assert len(edges) == 12


def test_the_state_of_a_node_is_a_symbol_a_word_and_a_class() -> None:
    picture = drawn(
        ALL_KINDS,
        draw=NodeMark("running", 3, 8, 0.4),
        best=NodeMark("done", 1, 1, None, 12.34),
        ask=NodeMark("asking"),
        **{"draw/do": NodeMark("failed")},
    )
    told = texts(picture)
    assert {"▶ running 3/8 40 %", "✓ done 12.3 s", "? asking", "✗ failed"} <= set(told)
    (bar,) = [each for each in picture.iter(f"{SVG}rect") if each.get("class") == "bar"]
    (track,) = [each for each in picture.iter(f"{SVG}rect") if each.get("class") == "track"]
    assert float(bar.get("width", 0)) / float(track.get("width", 1)) == pytest.approx(0.4, abs=0.01)


def test_marks_come_from_a_run_and_what_contains_a_running_node_runs() -> None:
    nodes = [
        *RUN["nodes"],
        {"id": "refine", "type": "loop", "status": "pending", "expected": 1},
        {"id": "refine/do", "type": "workflow", "status": "running", "expected": 1},
    ]
    question = {"node": "each", "message": "fine?"}
    run = GraphRunAnswer.model_validate({**RUN, "nodes": nodes, "questions": [question]})
    marks = marks_of(run)
    assert (marks["refine"].status, marks["each"].status) == ("running", "asking")
    assert marks["soften"].progress == pytest.approx(0.7)


@given(st.text(max_size=80), st.text(max_size=80))
def test_any_text_makes_a_valid_picture(name: str, condition: str) -> None:
    graph = parse_graph(
        document(node("c", "condition", condition=f'output.text == "{condition}"'), name=name)
    ).graph
    ElementTree.fromstring(draw_svg(graph, {"c": NodeMark(name)}))  # noqa: S314


def test_a_graph_in_a_circle_is_drawn() -> None:
    parsed = parse_graph(
        document(work("a"), work("b"), links=("a.output > b.input", "b.output > a.input"))
    )
    assert kinds(ElementTree.fromstring(draw_svg(parsed.graph))) == ["workflow", "workflow"]  # noqa: S314


def test_the_largest_graph_is_drawn_within_seconds() -> None:
    nodes = [work(f"n{number}", "blend") for number in range(500)]
    links = tuple(
        f"n{number}.output > n{number + step}.left{step}"
        for step in (1, 2, 3, 5, 50)
        for number in range(500 - step)
    )
    graph = parse_graph(document(*nodes, links=links)).graph
    begun = time.monotonic()
    assert len(draw_svg(graph)) < 4_000_000
    assert time.monotonic() - begun < 30


@st.composite
def graphs(draw: st.DrawFn) -> tuple[dict[str, Size], list[tuple[str, str]]]:
    count = draw(st.integers(1, 20))
    lengths = st.integers(20, 300)
    sizes = {f"n{number}": Size(draw(lengths), draw(lengths)) for number in range(count)}
    ends = st.integers(0, count - 1)
    pairs = draw(st.lists(st.tuples(ends, ends), max_size=30))
    return sizes, [(f"n{one}", f"n{two}") for one, two in pairs if one < two]


def overlaps(boxes: list[Box]) -> Iterator[tuple[Box, Box]]:
    for at, one in enumerate(boxes):
        for two in boxes[at + 1 :]:
            apart = one.x + one.width <= two.x or two.x + two.width <= one.x
            if not apart and not (
                one.y + one.height <= two.y + 0.01 or two.y + two.height <= one.y + 0.01
            ):
                yield one, two


@given(graphs())
def test_boxes_never_overlap_and_lines_lead_to_the_right(
    drawn_graph: tuple[dict[str, Size], list[tuple[str, str]]],
) -> None:
    sizes, edges = drawn_graph
    found = lay_out(sizes, edges)
    assert list(overlaps(list(found.boxes.values()))) == []
    place = layers(sizes, edges)
    assert all(place[one] < place[two] for one, two in edges)
    for each in found.boxes.values():
        assert each.x >= 0
        assert each.y >= -0.01
        assert each.x + each.width <= found.size.width + 0.01
        assert each.y + each.height <= found.size.height + 0.01
    for edge in found.edges:
        assert [x for x, _ in edge.points] == sorted(x for x, _ in edge.points)
