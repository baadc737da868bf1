"""Numbered groups, instances and nodes are a chain if they repeat each other and flow together."""

from typing import Any

import pytest
from tests.unit.drawn import Drawing
from tests.unit.drawn_chains import STYLES, Style, by_groups, by_instances, by_titles, in_a_subgraph

from comfyfleet.workflow.edit.chains import find_segments
from comfyfleet.workflow.edit.node_modes import switch
from comfyfleet.workflow.model import Mode


def found(document: dict[str, Any]) -> list[tuple[str, str, int]]:
    return [(chain.kind, chain.name, len(chain.segments)) for chain in find_segments(document)]


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("Extend {}", "Extend"),
        ("EXTEND{}", "EXTEND"),
        ("Segment_{:02d}", "Segment"),
        ("Part #{}", "Part"),
        ("Part ({}/5)", "Part"),
        ("{}. Extend", "Extend"),
        ("Clip {} - the cat jumps", "Clip"),
        ("Wan 2.2 Extend {}", "Wan 2 2 Extend"),
        ("単 {}", "単"),
    ],
)
def test_the_number_may_stand_anywhere(title: str, name: str) -> None:
    (chain,) = find_segments(by_groups(3, Style(title=title)))
    assert (chain.kind, chain.name) == ("group", name)
    assert [segment.title for segment in chain.segments] == [title.format(n) for n in (1, 2, 3)]


def test_segments_have_their_numbers_and_nodes() -> None:
    (chain,) = find_segments(by_groups(3, Style()))
    first, *_, last = chain.segments
    assert (first.number, first.nodes) == (1, ("3", "4", "5", "6", "7", "8", "9"))
    assert (last.number, last.nodes) == (3, ("17", "18", "19", "20", "21", "22", "23"))
    assert (chain.off, chain.graph) == ((), "")


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_every_style_of_groups_is_one_chain(style: Style) -> None:
    ((kind, _, count),) = found(by_groups(3, style))
    assert (kind, count) == ("group", 3)


def test_titles_that_follow_each_other_are_one_chain() -> None:
    (chain,) = find_segments(by_titles(3))
    assert (chain.kind, chain.name) == ("title", "Sampler")
    assert chain.segments[0].nodes == ("5", "6")


@pytest.mark.parametrize("own", [False, True])
def test_instances_are_a_chain(own: bool) -> None:
    assert found(by_instances(3, own=own)) == [("instance", "Clip" if own else "Extend", 3)]


def test_a_chain_in_a_definition_is_found() -> None:
    (chain,) = find_segments(in_a_subgraph(3))
    assert (chain.kind, chain.graph[:8]) == ("instance", "00000000")


def test_groups_go_before_what_is_in_them() -> None:
    document = by_groups(3, Style())
    for number, node in enumerate(
        (node for node in document["nodes"] if node["type"] == "KSampler"), start=1
    ):
        node["title"] = f"Sampler {number}"
    assert found(document) == [("group", "Extend", 3)]


def test_numbers_may_have_gaps_and_any_order_in_the_file() -> None:
    document = by_groups(3, Style())
    for group, number in zip(document["groups"], (2, 10, 30), strict=True):
        group["title"] = f"Extend {number}"
    document["groups"].reverse()
    (chain,) = find_segments(document)
    assert [segment.number for segment in chain.segments] == [2, 10, 30]


def test_numbers_against_the_flow_are_no_chain() -> None:
    document = by_groups(3, Style())
    for group, number in zip(document["groups"], (3, 2, 1), strict=True):
        group["title"] = f"Extend {number}"
    assert find_segments(document) == ()


def test_steps_that_differ_are_no_chain() -> None:
    drawing = Drawing()
    loader = drawing.node("CheckpointLoader", at=(0, 0))
    text = drawing.node("CLIPTextEncode", at=(1000, 0), clip=(loader, 1))
    drawing.node("KSampler", at=(2000, 0), model=(loader, 0), positive=(text, 0))
    for number, what in enumerate(("load the model", "write a text", "run"), start=1):
        drawing.group(f"Step {number} - {what}", number * 1000 - 1100, -100, 900, 900)
    assert find_segments(drawing.workflow()) == ()


def test_inputs_that_are_numbered_are_no_chain() -> None:
    drawing = Drawing()
    images = [
        drawing.node("LoadImage", title=f"Image {number}", at=(number * 1000, 0))
        for number in (1, 2)
    ]
    drawing.node("ImageBatch", at=(5000, 0), image1=(images[0], 0), image2=(images[1], 0))
    for number in (1, 2):
        drawing.group(f"Image {number}", number * 1000 - 50, -100, 900, 900)
    assert find_segments(drawing.workflow()) == ()


def test_a_segment_with_nothing_left_on_but_a_loader_is_off() -> None:
    document = by_groups(3, Style())
    loader = Drawing(first_id=90)
    loader.node("LoadImage", at=(2050, 500))
    document["nodes"].extend(loader.nodes)
    document = switch(document, bypass=["Extend 2"], enable=["90"]).document
    (chain,) = find_segments(document)
    assert [segment.number for segment in chain.segments] == [1, 3]
    assert [segment.number for segment in chain.off] == [2]


def test_dead_shells_are_no_segments() -> None:
    document = by_instances(4, own=True)
    for node in document["definitions"]["subgraphs"][2]["nodes"]:
        node["mode"] = Mode.BYPASSED
    (chain,) = find_segments(document)
    assert [segment.title for segment in chain.segments] == ["Clip 1", "Clip 2", "Clip 4"]
    assert [segment.title for segment in chain.off] == ["Clip 3"]


def test_a_node_in_two_groups_belongs_to_the_inner_one() -> None:
    document = by_groups(2, Style())
    document["groups"].append({"title": "Extend 1", "bounding": [0, -500, 9000, 9000]})
    (chain,) = find_segments(document)
    assert "10" in chain.segments[1].nodes
    assert "10" not in chain.segments[0].nodes
