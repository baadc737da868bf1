"""Nodes are switched by id, title or group; what a prompt is made of shows it."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.drawn import OBJECT_INFO, Drawing, port
from tests.unit.drawn_chains import Style, by_groups

from comfyfleet.errors import InvalidInput
from comfyfleet.workflow import convert
from comfyfleet.workflow.edit.node_modes import dead_shells, switch
from comfyfleet.workflow.model import Mode

LOADER, IMAGE, FIRST, SECOND, PREVIEW, SAVE = 1, 2, 3, 4, 5, 6


def upscaling() -> dict[str, Any]:
    """An image scaled twice, both times inside the group "Refine", then shown and saved."""
    drawing = Drawing()
    drawing.node("CheckpointLoader", "a.ckpt")
    image = drawing.node("LoadImage", "cat.png", title="Picture")
    first = drawing.node("ImageScale", 512, at=(100, 100), image=(image, 0))
    second = drawing.node("ImageScale", 1024, title="Larger", at=(400, 100), image=(first, 0))
    drawing.node("PreviewImage", title="Look", at=(100, 300), images=(second, 0))
    drawing.node("SaveImage", "out", title="Keep", at=(900, 100), images=(second, 0))
    drawing.group("Refine", 90, 60, 600, 200)
    drawing.group("Show", 90, 260, 600, 200)
    drawing.group("Nothing here", 5000, 5000, 100, 100)
    return drawing.workflow()


def scaler(name: str = "Scaler", *, first_id: int = 21) -> dict[str, Any]:
    drawing = Drawing(first_id=first_id, inputs="image:IMAGE", outputs="image:IMAGE")
    inner = drawing.node("ImageScale", 64, title="Inner", image=port(0))
    twice = drawing.node("ImageScale", 128, at=(300, 0), image=(inner, 0))
    drawing.node("PreviewImage", at=(300, 400), images=(inner, 0))
    drawing.outlet("image", (twice, 0))
    drawing.group("Looking", 290, 360, 300, 300)
    return drawing.definition(name)


def two_instances() -> dict[str, Any]:
    """Two instances of one definition in a row: 2 and 3."""
    drawing, definition = Drawing(), scaler()
    image = drawing.node("LoadImage", "cat.png")
    one = drawing.instance(definition, title="Scale 1", image=(image, 0))
    two = drawing.instance(definition, title="Scale 2", image=(one, 0))
    drawing.node("SaveImage", "out", images=(two, 0))
    return drawing.workflow()


def nested() -> dict[str, Any]:
    """Instances 2 and 3 of "Outer", which holds instance 31 of "Scaler"."""
    outer = Drawing(first_id=31, inputs="image:IMAGE", outputs="image:IMAGE")
    scaling = outer.instance(scaler(), image=port(0))
    outer.outlet("image", (scaling, 0))
    drawing, definition = Drawing(), outer.definition("Outer")
    image = drawing.node("LoadImage", "cat.png")
    one = drawing.instance(definition, image=(image, 0))
    two = drawing.instance(definition, image=(one, 0))
    drawing.node("SaveImage", "out", images=(two, 0))
    document = drawing.workflow()
    document["definitions"]["subgraphs"].extend(outer.definitions)
    return document


def modes(document: dict[str, Any]) -> dict[int, int]:
    return {node["id"]: node["mode"] for node in document["nodes"] if node["mode"]}


def sent(document: dict[str, Any]) -> dict[str, Any]:
    """Links of the prompt: id → input → source."""
    return {
        key: {name: value for name, value in entry["inputs"].items() if isinstance(value, list)}
        for key, entry in convert(document, OBJECT_INFO).items()
    }


def refused(**selectors: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        switch(upscaling(), **selectors)
    return caught.value.message


@pytest.mark.parametrize(
    "selector", ["4", "id:4", "Larger", "title:Larger", "larger", "title:LARGER"]
)
def test_a_node_is_found_by_its_id_or_title(selector: str) -> None:
    result = switch(upscaling(), bypass=[selector])
    assert modes(result.document) == {SECOND: Mode.BYPASSED}
    assert result.done == ('bypassed node 4 ImageScale "Larger"',)
    assert result.warnings == ()


@pytest.mark.parametrize("selector", ["Refine", "refine", "group:Refine", "group:REFINE"])
def test_a_group_means_the_nodes_whose_centre_it_holds(selector: str) -> None:
    result = switch(upscaling(), bypass=[selector])
    assert modes(result.document) == {FIRST: Mode.BYPASSED, SECOND: Mode.BYPASSED}
    assert sent(result.document)["6"] == {"images": ["2", 0]}


def test_a_node_without_a_title_goes_by_its_type() -> None:
    assert modes(switch(upscaling(), mute=["ImageScale"]).document) == {FIRST: Mode.MUTED}


def test_a_node_with_a_title_does_not() -> None:
    assert "title:LoadImage: no node has this name" in refused(mute=["title:LoadImage"])


def test_muted_nodes_feed_nothing() -> None:
    prompt = sent(switch(upscaling(), mute=["Larger"]).document)
    assert "4" not in prompt
    assert prompt["6"] == {}


def test_all_nodes_of_one_title_are_meant() -> None:
    document = upscaling()
    document["nodes"][0]["title"] = "Larger"
    assert modes(switch(document, mute=["Larger"]).document) == {1: 2, SECOND: 2}


def test_enabled_nodes_take_part_again() -> None:
    document = switch(upscaling(), bypass=["Refine"], mute=["Show"]).document
    assert switch(document, enable=["Refine", "Show"]).document == upscaling()


def test_an_exact_way_to_name_a_node_wins_over_a_broad_one() -> None:
    result = switch(upscaling(), bypass=["Refine"], mute=["Larger"], enable=["Show"])
    assert modes(result.document) == {FIRST: Mode.BYPASSED, SECOND: Mode.MUTED}
    result = switch(upscaling(), bypass=["Larger"], mute=["4"])
    assert modes(result.document) == {SECOND: Mode.MUTED}


@pytest.mark.parametrize(
    ("selector", "numbers"),
    [("Extend 2-3", (2, 3)), ("group:Extend 2", (2,)), ("extend *", (1, 2, 3, 4)),
     ("Extend 3 \u2013 4", (3, 4)), ("Extend ?", (1, 2, 3, 4))],
)  # fmt: skip
def test_numbered_parts_are_named_by_a_range_or_a_pattern(
    selector: str, numbers: tuple[int, ...]
) -> None:
    document = by_groups(4, Style())
    one_by_one = [f"Extend {number}" for number in numbers]
    expected = switch(document, mute=one_by_one).document
    assert switch(document, mute=[selector]).document == expected
    assert expected != document


def test_a_range_names_the_part_that_is_not_there() -> None:
    with pytest.raises(InvalidInput, match="Extend 5: no node or group has this name"):
        switch(by_groups(4, Style()), mute=["Extend 3-5"])
    with pytest.raises(InvalidInput, match="must end with a higher number"):
        switch(by_groups(4, Style()), mute=["Extend 3-1"])
    with pytest.raises(InvalidInput, match="no node or group has this name"):
        switch(by_groups(4, Style()), mute=["Nothing *"])


def test_contradictions_are_refused() -> None:
    message = refused(bypass=["Larger"], mute=["title:larger"])
    assert message == (
        'node 4 ImageScale "Larger" can\'t be both bypassed (Larger) and muted (title:larger)'
    )


def test_all_problems_are_told_at_once() -> None:
    message = refused(bypass=["Lager", "4"], mute=["group:Refin"], enable=["99"])
    assert message.splitlines() == [
        "Lager: no node or group has this name; closest: Larger",
        "group:Refin: no group has this name; closest: Refine",
        "99: no node or group has this name",
    ]


def test_an_id_that_is_not_there_is_told_with_close_ones() -> None:
    with pytest.raises(InvalidInput, match=r"id:2:24: no node has this name; closest: .*2:2[123]"):
        switch(two_instances(), mute=["id:2:24"])


def test_one_title_of_a_node_and_a_group_must_be_told_apart() -> None:
    document = upscaling()
    document["groups"][0]["title"] = "Larger"
    with pytest.raises(InvalidInput, match="use title:Larger or group:Larger"):
        switch(document, bypass=["Larger"])
    assert modes(switch(document, bypass=["title:Larger"]).document) == {SECOND: 4}
    assert modes(switch(document, bypass=["group:Larger"]).document) == {FIRST: 4, SECOND: 4}


def test_an_empty_group_is_a_problem() -> None:
    assert "contains no nodes" in refused(mute=["Nothing here"])


def test_what_is_so_already_is_told() -> None:
    result = switch(upscaling(), enable=["4"])
    assert result.document == upscaling()
    assert (result.done, result.warnings) == ((), ("4: already enabled",))


@pytest.mark.parametrize(
    ("change", "inside"),
    [
        ({"pos": [590, 100]}, False),  # the right edge, 690, is outside
        ({"pos": [589, 100]}, True),
        ({"pos": [-10, 100]}, True),  # the left edge, 90, is inside
        ({"pos": [-11, 100]}, False),
        ({"pos": [100, 240]}, False),  # 240 - 30 + 50 is the lower edge, 260
        ({"pos": [100, 239]}, True),
        ({"pos": {"0": 100, "1": 239}, "size": {"0": 200, "1": 70}}, True),
        ({"pos": [100, 274], "flags": {"collapsed": True}}, True),  # only its title is left
        ({"pos": [100, 240], "type": "Reroute"}, False),  # has no title: 240 + 35
        ({"pos": [100, 224], "type": "Reroute"}, True),
        ({"pos": None}, False),
        ({"pos": [10**400, 0]}, False),
    ],
)
def test_the_centre_of_a_node_decides_as_in_the_editor(
    change: dict[str, Any], inside: bool
) -> None:
    document = upscaling()
    document["nodes"][FIRST - 1].update(change)
    assert (FIRST in modes(switch(document, mute=["Refine"]).document)) is inside


def test_a_node_named_through_its_instance_changes_there_only() -> None:
    result = switch(two_instances(), bypass=["2:21"])
    assert result.done == (
        "gave instance 2 its own copy of its subgraph, so that no other instance changes",
        'bypassed subgraph "Scaler" › node 21 ImageScale "Inner"',
    )
    prompt = convert(result.document, OBJECT_INFO)
    widths = sorted(entry["inputs"].get("width", 0) for entry in prompt.values())
    assert widths == [0, 0, 0, 0, 64, 128, 128]
    assert prompt["3:21"]["inputs"]["width"] == 64


def test_a_copy_is_made_once_and_keeps_its_ids() -> None:
    result = switch(two_instances(), bypass=["2:21", "2:22"], mute=["3:23"])
    assert len(result.document["definitions"]["subgraphs"]) == 2
    again = switch(result.document, enable=["2:21"])
    assert len(again.document["definitions"]["subgraphs"]) == 2
    assert again.done == ('enabled subgraph "Scaler" › node 21 ImageScale "Inner"',)


def test_ids_are_understood_as_the_prompt_shows_them() -> None:
    document = switch(two_instances(), bypass=["2:21"]).document
    inner = [key for key in convert(document, OBJECT_INFO) if key.startswith("2:")]
    assert len(inner) == 2
    assert "2:21" not in inner
    prompt = convert(switch(document, mute=inner).document, OBJECT_INFO)
    assert not any(key.startswith("2:") for key in prompt)


def test_every_level_of_instances_gets_its_copy() -> None:
    result = switch(nested(), mute=["2:31:23"])
    assert len(result.document["definitions"]["subgraphs"]) == 4
    previews = [
        key
        for key, entry in convert(result.document, OBJECT_INFO).items()
        if entry["class_type"] == "PreviewImage"
    ]
    assert previews == ["3:31:23"]


def test_an_instance_that_shares_with_none_is_changed_in_place() -> None:
    drawing = Drawing()
    drawing.instance(scaler(), image=(drawing.node("LoadImage"), 0))
    result = switch(drawing.workflow(), mute=["2:23"])
    assert [graph["name"] for graph in result.document["definitions"]["subgraphs"]] == ["Scaler"]
    assert result.done == ('muted subgraph "Scaler" › node 23 PreviewImage',)


@pytest.mark.parametrize("selector", ["Inner", "Looking"])
def test_a_title_or_group_in_a_definition_means_all_instances(selector: str) -> None:
    result = switch(two_instances(), mute=[selector])
    assert result.warnings == (f'{selector}: all 2 instances of subgraph "Scaler" change',)
    assert len(convert(result.document, OBJECT_INFO)) == 2 + 4


def test_an_instance_is_called_by_its_definition_if_it_has_no_title() -> None:
    assert modes(switch(nested(), mute=["Outer"]).document) == {2: 2, 3: 2}


def test_enabling_inside_an_instance_that_is_off_is_warned_of() -> None:
    document = switch(two_instances(), bypass=["2"], mute=["2:23"]).document
    result = switch(document, enable=["2:23"])
    assert result.warnings == ("2:23: enabled, but the enclosing instance 2 is bypassed",)


def test_switching_off_an_instance_in_a_subgraph_is_warned_of() -> None:
    (warning,) = switch(nested(), mute=["2:31"]).warnings
    assert "still sent" in warning


def test_an_instance_with_nothing_but_switched_off_nodes_is_a_dead_shell() -> None:
    document = switch(two_instances(), bypass=["2:21", "2:22"], mute=["2:23"]).document
    (shell,) = dead_shells(document)
    assert shell == ("2", "Scale 1", "Scaler")
    assert dead_shells(two_instances()) == ()


def test_dead_shells_are_found_at_every_level() -> None:
    document = nested()
    scaling = document["definitions"]["subgraphs"][1]
    for node in scaling["nodes"]:
        node["mode"] = 4
    assert [shell.id for shell in dead_shells(document)] == ["2", "3"]
    outer = Drawing(first_id=50)
    outer.node("LoadImage")
    document["definitions"]["subgraphs"][0]["nodes"].extend(outer.nodes)
    assert [shell.id for shell in dead_shells(document)] == ["2:31", "3:31"]


def test_enabling_a_dead_shell_enables_what_is_in_it() -> None:
    dead = switch(nested(), bypass=["Scaler", "Inner", "ImageScale", "PreviewImage"]).document
    assert [shell.id for shell in dead_shells(dead)] == ["2", "3"]
    result = switch(dead, enable=["2"])
    assert 'enabled all nodes in instance 2 "Outer"' in result.done
    assert [shell.id for shell in dead_shells(result.document)] == ["3"]
    prompt = convert(result.document, OBJECT_INFO)
    assert sum(key.startswith("2:") for key in prompt) == 3
    assert not any(key.startswith("3:") for key in prompt)


def test_of_a_dead_shell_only_what_is_named_may_be_enabled() -> None:
    dead = switch(two_instances(), bypass=["Inner", "ImageScale", "PreviewImage"]).document
    prompt = convert(switch(dead, enable=["2", "2:22"]).document, OBJECT_INFO)
    assert [entry["inputs"]["width"] for key, entry in prompt.items() if ":" in key] == [128]
    prompt = convert(switch(dead, enable=["2"], mute=["2:23"]).document, OBJECT_INFO)
    assert sum(key.startswith("2:") for key in prompt) == 2


def test_notes_alone_make_no_dead_shell() -> None:
    document = two_instances()
    document["definitions"]["subgraphs"][0]["nodes"] = [{"id": 90, "type": "Note", "mode": 4}]
    assert dead_shells(document) == ()


DOCUMENTS = {"flat": upscaling(), "two": two_instances(), "nested": nested()}
SELECTORS = {
    "flat": ["1", "2", "3", "4", "Larger", "Refine", "group:Show", "Keep"],
    "two": ["2", "3", "2:21", "3:22", "2:23", "Inner", "Looking"],
    "nested": ["2", "2:31", "2:31:21", "3:31:22", "Outer", "Looking"],
}


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_the_document_is_never_modified_and_enabling_restores_it(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(DOCUMENTS)))
    chosen = data.draw(st.lists(st.sampled_from(SELECTORS[name]), unique=True))
    ways = data.draw(st.lists(st.sampled_from(["bypass", "mute"]), min_size=1, max_size=1))
    before = copy.deepcopy(DOCUMENTS[name])
    off = switch(DOCUMENTS[name], **{ways[0]: chosen}).document
    kept = copy.deepcopy(off)
    on = switch(off, enable=chosen).document
    assert DOCUMENTS[name] == before
    assert off == kept
    assert all(not mode for graph in graphs_of(on) for mode in modes(graph).values())


def graphs_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [document, *document.get("definitions", {}).get("subgraphs", [])]
