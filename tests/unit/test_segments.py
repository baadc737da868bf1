"""Of a chain of segments the first are kept, and the rest of the workflow goes on with them."""

import contextlib
import copy
import json
from hashlib import sha256
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.drawn import OBJECT_INFO, Drawing
from tests.unit.drawn_chains import CHAINS, Place, Style, by_groups, by_instances, in_a_subgraph

from comfyfleet.errors import FleetError, InvalidInput
from comfyfleet.workflow import convert
from comfyfleet.workflow.edit.chain_truncation import keep_segments
from comfyfleet.workflow.edit.chains import find_segments
from comfyfleet.workflow.edit.node_modes import dead_shells, switch
from comfyfleet.workflow.model import Mode

COUNT = 3


def made(document: dict[str, Any]) -> list[str]:
    """What the output nodes of a workflow make, each told by everything that feeds it."""
    prompt = convert(document, OBJECT_INFO)
    told: dict[str, str] = {}
    for key, entry in prompt.items():  # each after those that feed it
        inputs = {
            name: told[value[0]] + f" {value[1]}" if isinstance(value, list) else value
            for name, value in sorted(entry["inputs"].items())
        }
        text = json.dumps([entry["class_type"], inputs])
        told[key] = f"{entry['class_type']} {sha256(text.encode()).hexdigest()}"
    return sorted(
        told[key]
        for key, entry in prompt.items()
        if OBJECT_INFO[entry["class_type"]]["output_node"]
    )


def assert_links_agree(graph: dict[str, Any]) -> None:
    """Every link stands in the list and at both of its nodes."""
    links = {link[0]: link for link in graph["links"]}
    starts = {
        (number, node["id"], slot)
        for node in graph["nodes"]
        for slot, output in enumerate(node["outputs"])
        for number in output["links"]
    }
    ends = {
        (entry["link"], node["id"])
        for node in graph["nodes"]
        for entry in node["inputs"]
        if entry["link"] is not None
    }
    assert starts == {(number, link[1], link[2]) for number, link in links.items()}
    assert ends == {(number, link[3]) for number, link in links.items()}


def modes(document: dict[str, Any], kind: str) -> list[int]:
    return [node["mode"] for node in document["nodes"] if node["type"] == kind]


def refused(document: dict[str, Any], count: int, **options: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        keep_segments(document, count, **options)
    return caught.value.message


@pytest.mark.parametrize("info", [OBJECT_INFO, None], ids=["with types", "as saved"])
@pytest.mark.parametrize("keep", range(1, COUNT))
@pytest.mark.parametrize("name", CHAINS)
def test_what_is_kept_makes_what_a_shorter_chain_makes(
    name: str, keep: int, info: dict[str, Any] | None
) -> None:
    document = CHAINS[name](COUNT)
    before = copy.deepcopy(document)
    result = keep_segments(document, keep, object_info=info)
    assert document == before
    assert made(result.document) == made(CHAINS[name](keep))
    assert_links_agree(result.document)


PLACES = st.sampled_from(get_args(Place)[:2])
GROUP_CHAINS = st.builds(
    Style,
    title=st.sampled_from(["Extend {}", "{}. Extend", "Wan 2.2 Extend {:03d} of 28"]),
    feeds_next=st.just(True),
    decode=PLACES,
    hand_over=PLACES,
    preview=st.sampled_from(get_args(Place)),
    join=st.sampled_from([*get_args(Place), "by one node"]),
    join_class=st.sampled_from(["ImageBatch", "NewThenOld"]),
    wires=st.booleans(),
    last_group_has_all=st.booleans(),
    tail=st.sampled_from(["saved", "scaled", "matched"]),
)


@given(style=GROUP_CHAINS, count=st.integers(2, 5), data=st.data())
@settings(max_examples=40, deadline=None)
def test_chains_are_closed_however_they_are_built(
    style: Style, count: int, data: st.DataObject
) -> None:
    keep = data.draw(st.integers(1, count))
    document = by_groups(count, style)
    before = copy.deepcopy(document)
    result = keep_segments(
        document, keep, object_info=data.draw(st.sampled_from([OBJECT_INFO, None]))
    )
    assert document == before
    assert made(result.document) == made(by_groups(keep, style))


def test_all_of_a_chain_may_be_kept() -> None:
    document = by_groups(3, Style())
    assert keep_segments(document, 3) == (
        document,
        ('kept all of "Extend" (group, 3 segments)',),
        (),
    )


def test_what_was_done_is_told() -> None:
    result = keep_segments(by_groups(3, Style()), 1)
    assert result.done == (
        'kept "Extend 1" of "Extend" (group, 3 segments)',
        "bypassed nodes 10, 11, 12, 13, 14, 15, 17, 18, 19, 20, 21",
        "muted nodes 16, 22, 23",
    )
    assert result.warnings == ()


def test_a_bypass_is_used_where_it_passes_on_the_right_thing() -> None:
    result = keep_segments(by_groups(3, Style()), 1).document
    assert result["links"] == by_groups(3, Style())["links"]
    assert modes(result, "ImageBatch") == [Mode.ALWAYS, Mode.BYPASSED, Mode.BYPASSED]
    assert modes(result, "PreviewImage") == [Mode.ALWAYS, Mode.MUTED, Mode.MUTED]


def test_links_are_moved_where_it_does_not() -> None:
    result = keep_segments(by_groups(3, Style(join_class="NewThenOld")), 1)
    assert set(modes(result.document, "NewThenOld")[1:]) == {Mode.MUTED}
    assert result.done[-1] == ("node 25 SaveVideo › input images is now fed by node 7 NewThenOld")


def test_one_node_that_gathers_all_loses_inputs_and_counts_anew() -> None:
    style = Style(join="by one node", feeds_next=False)
    result = keep_segments(by_groups(4, style), 2).document
    (gathering,) = [node for node in result["nodes"] if node["type"] == "ImageBatchMulti"]
    assert gathering["widgets_values"][0] == 2
    assert [entry["link"] is None for entry in gathering["inputs"]] == [False] * 2 + [True] * 2
    assert_links_agree(result)


def test_texts_of_segments_that_go_are_off_if_their_class_is_known() -> None:
    document = by_groups(3, Style())
    for group in document["groups"]:
        group["bounding"][1:] = [70, 800, 900]  # texts stand above their groups now
    known = keep_segments(document, 1, object_info=OBJECT_INFO).document
    assert modes(known, "CLIPTextEncode") == [Mode.ALWAYS, Mode.BYPASSED, Mode.BYPASSED]
    assert set(modes(keep_segments(document, 1).document, "CLIPTextEncode")) == {Mode.ALWAYS}


def test_what_others_need_stays_on_and_is_told() -> None:
    result = keep_segments(by_groups(3, Style(last_group_has_all=True)), 1)
    assert [warning.split(" stays")[0] for warning in result.warnings] == [
        "node 3 VAELoader", "node 25 FrameRate", "node 26 SaveVideo",
    ]  # fmt: skip


def counted(*, required: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last segment counts what came into it; its sampler and the saver use that number."""
    chain = by_groups(2, Style())
    drawing = Drawing(first_id=chain["last_node_id"] + 1)
    drawing.nodes, drawing.links = chain["nodes"], chain["links"]
    (_, sampler), (saver,) = (
        [node["id"] for node in chain["nodes"] if node["type"] == kind]
        for kind in ("KSampler", "SaveVideo")
    )
    (hand_over, *_) = [node["id"] for node in chain["nodes"] if node["type"] == "ImageFromBatch"]
    number = drawing.node("CountFrames", at=(2300, 600), images=(hand_over, 0)), 0
    drawing.feed(sampler, "seed", number)
    slots = next(node for node in chain["nodes"] if node["id"] == saver)["inputs"]
    slots[:] = [slot for slot in slots if slot["name"] != "fps"]
    drawing.feed(saver, "fps", number)
    info = copy.deepcopy(OBJECT_INFO)
    if not required:
        inputs = info["SaveVideo"]["input"]
        inputs["optional"] = {"fps": inputs["required"].pop("fps")}
    return chain, info


def test_a_chain_that_cannot_be_closed_is_refused() -> None:
    document, info = counted(required=True)
    assert refused(document, 1, object_info=info) == (
        '"Extend" (group, 2 segments) can\'t be truncated after "Extend 1": '
        "no source remains for node 18 SaveVideo › input fps"
    )


def test_an_input_that_may_be_empty_is_only_warned_of() -> None:
    document, info = counted(required=False)
    result = keep_segments(document, 1, object_info=info)
    assert result.warnings == ("node 18 SaveVideo › input fps has no source anymore",)


def test_more_segments_than_there_are_is_refused() -> None:
    document = by_groups(3, Style())
    assert refused(document, 4) == 'can\'t keep 4 segments of "Extend" (group, 3 segments)'
    assert refused(document, 0) == "at least one segment must be kept"


def test_segments_that_are_off_are_switched_on_where_they_are_needed() -> None:
    document = switch(by_groups(5, Style()), bypass=["Extend 3-4"], mute=["Extend 5"]).document
    result = keep_segments(document, 4)
    assert result.done[0] == 'switched on "Extend 3", "Extend 4"'
    assert made(result.document) == made(by_groups(4, Style()))
    assert made(keep_segments(document, 5).document) == made(by_groups(5, Style()))
    assert refused(document, 6) == (
        'can\'t keep 6 segments of "Extend" (group, 2 segments), even with the 3 that are off'
    )


def passed_on_by_wires(total: int, on: int) -> dict[str, Any]:
    """Segments that hand their picture on by Set and Get; those after `on` are off, and one node in each is off."""
    drawing = Drawing()
    drawing.wire("SetNode", "film_0", "IMAGE", (drawing.node("LoadImage", "cat.png"), 0))
    for number in range(1, total + 1):
        left = number * 1000.0
        drawing.group(f"Extend {number}", left - 50, -100, 900, 900)
        found = drawing.wire("GetNode", f"film_{number - 1}", "IMAGE", at=(left, 0))
        routed = drawing.wire("Reroute", "", "IMAGE", (found, 0), at=(left + 100, 0))
        scaled = drawing.node("ImageScale", number, at=(left + 200, 0), image=(routed, 0))
        cut = drawing.node("ImageFromBatch", 7, mode=4, at=(left + 300, 0), image=(scaled, 0))
        joined = drawing.node("ImageBatch", at=(left + 400, 0), image1=(cut, 0), image2=(cut, 0))
        drawing.node("PreviewImage", at=(left + 500, 0), images=(joined, 0))
        drawing.wire("SetNode", f"film_{number}", "IMAGE", (joined, 0), at=(left + 600, 0))
    film = drawing.wire("GetNode", f"film_{total}", "IMAGE", at=(0, 2000))
    drawing.node("SaveImage", "film", at=(300, 2000), images=(film, 0))
    document = drawing.workflow()
    off = [f"Extend {number}" for number in range(on + 1, total + 1)]
    return switch(document, bypass=off).document if off else document


@pytest.mark.parametrize("keep", range(1, 9))
def test_segments_that_are_off_at_the_end_are_part_of_the_chain(keep: int) -> None:
    document = passed_on_by_wires(8, 4)
    result = keep_segments(document, keep, object_info=OBJECT_INFO)
    assert made(result.document) == made(passed_on_by_wires(keep, keep))
    assert modes(result.document, "ImageFromBatch") == [Mode.BYPASSED] * 8, "off in every segment"


def test_an_output_that_nothing_feeds_is_an_error() -> None:
    document = passed_on_by_wires(3, 3)
    wire = [node for node in document["nodes"] if node["type"] == "GetNode"][-1]
    wire["mode"] = Mode.BYPASSED
    assert "no source remains for node" in refused(document, 3, object_info=OBJECT_INFO)
    assert "SaveImage" in refused(document, 3)
    assert "SaveImage" in refused(document, 2)


def test_dead_shells_are_switched_on_with_all_that_is_in_them() -> None:
    document = by_instances(3, own=True)
    for definition in document["definitions"]["subgraphs"][1:]:
        for node in definition["nodes"]:
            node["mode"] = Mode.BYPASSED
    assert made(keep_segments(document, 2).document) == made(by_instances(2, own=True))


def test_a_chain_goes_on_through_segments_that_are_off() -> None:
    document = switch(by_groups(4, Style()), bypass=["Extend 2", "Extend 4"]).document
    result = keep_segments(document, 1)
    assert result.done[0] == 'kept "Extend 1" of "Extend" (group, 2 segments)'
    assert made(result.document) == made(by_groups(1, Style()))


def test_a_chain_goes_on_through_dead_shells() -> None:
    document = by_instances(4, own=True)
    for definition in document["definitions"]["subgraphs"][1::2]:
        for node in definition["nodes"]:
            node["mode"] = Mode.BYPASSED
    kept = keep_segments(document, 1)
    assert kept.done[0] == 'kept "Clip 1" of "Clip" (instance, 2 segments)'
    expected = made(by_instances(1, own=True))
    assert [text for text in expected if "SaveImage" not in text] == [
        text for text in made(kept.document) if "SaveImage" not in text
    ]


def test_of_several_chains_one_must_be_named() -> None:
    document = by_groups(3, Style())
    loras = Drawing(first_id=100)
    loras.nodes, loras.links = document["nodes"], document["links"]
    model = 1, 0
    for number in (1, 2):
        model = loras.node("LoraLoader", title=f"LoRA {number}", model=model), 0
    for node in document["nodes"]:
        if node["type"] == "KSampler":
            document["links"][node["inputs"][0]["link"] - 1][1:3] = model
    assert refused(document, 1) == (
        "there are several chains; choose one: "
        '"Extend" (group, 3 segments), "LoRA" (title, 2 segments)'
    )
    assert "no chain is named Lore" in refused(document, 1, chain="Lore")
    (bypassed,) = [
        node for node in keep_segments(document, 1, chain="lora").document["nodes"] if node["mode"]
    ]
    assert bypassed["title"] == "LoRA 2"
    assert keep_segments(document, 1, chain="group:extend").done[0].startswith('kept "Extend 1"')


def test_a_workflow_without_a_chain_is_told_so() -> None:
    drawing = Drawing()
    drawing.node("PreviewImage", images=(drawing.node("LoadImage"), 0))
    assert refused(drawing.workflow(), 1) == "this workflow has no chain of numbered segments"


def test_a_chain_in_a_definition_changes_in_all_its_instances() -> None:
    document = in_a_subgraph(3)
    second = copy.deepcopy(next(node for node in document["nodes"] if node["id"] == 3))
    document["nodes"].append({**second, "id": 99, "inputs": [], "outputs": []})
    (warning,) = keep_segments(document, 1).warnings
    assert warning == "the chain is in a subgraph with 2 instances, all of which change"


def test_bends_that_are_drawn_on_a_moved_link_go() -> None:
    document = by_groups(3, Style(join_class="NewThenOld"))
    saver = next(node for node in document["nodes"] if node["type"] == "SaveVideo")
    moved = saver["inputs"][0]["link"]
    document["extra"] = {
        "linkExtensions": [{"id": moved, "parentId": 1}, {"id": 1, "parentId": 2}],
        "reroutes": [{"id": 1, "linkIds": [moved]}, {"id": 2, "linkIds": [1]}],
    }
    extra = keep_segments(document, 1).document["extra"]
    assert extra["linkExtensions"] == [{"id": 1, "parentId": 2}]
    assert [bend["linkIds"] for bend in extra["reroutes"]] == [[], [1]]


@pytest.mark.parametrize("name", ["Wan 2.2 Extend", "group:wan 2.2 extend #", "Wan 2 2 Extend"])
def test_a_chain_is_called_by_what_stands_before_the_number(name: str) -> None:
    document = by_groups(2, Style(title="Wan 2.2 Extend #{}"))
    assert keep_segments(document, 1, chain=name).done


def as_version_1(document: dict[str, Any]) -> dict[str, Any]:
    keys = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    links = [dict(zip(keys, link, strict=True)) for link in document["links"]]
    state = {"lastNodeId": document["last_node_id"], "lastLinkId": len(links)}
    return {
        "version": 1,
        "state": state,
        "nodes": document["nodes"],
        "groups": document["groups"],
        "links": [{**link, "parentId": 1} for link in links],
        "reroutes": [{"id": 1, "pos": [0, 0], "linkIds": [link["id"] for link in links]}],
    }


def test_both_versions_of_the_file_are_understood() -> None:
    style = Style(join_class="NewThenOld")
    result = keep_segments(as_version_1(by_groups(3, style)), 1).document
    assert made(result) == made(by_groups(1, style))
    (moved,) = [link for link in result["links"] if "parentId" not in link]
    assert moved["id"] not in result["reroutes"][0]["linkIds"]


def test_a_cycle_through_the_chain_is_no_trouble() -> None:
    document = by_groups(3, Style())
    loader, last = document["nodes"][1], document["nodes"][-3]
    link = [999, last["id"], 0, loader["id"], 0, "IMAGE"]
    document["links"].append(link)
    loader["inputs"].append({"name": "again", "type": "IMAGE", "link": 999})
    assert "no source remains for node 2 LoadImage › input again" in refused(document, 1)


JUNK = st.sampled_from(
    [None, 0, -1, "-10", 2, 4, "", "x", "12", [], {}, [None], {"id": 1}, 1.5, True]
)


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Everything that can be replaced in a document: what holds it, and where."""
    found: list[tuple[Any, Any]] = []
    pending = [value]
    for holder in pending:
        keys = holder if isinstance(holder, dict) else range(len(holder))
        found.extend((holder, key) for key in keys)
        pending.extend(holder[key] for key in keys if isinstance(holder[key], dict | list))
    return found


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_broken_document_ends_in_an_error_of_ours_or_works(data: st.DataObject) -> None:
    document = copy.deepcopy(CHAINS[data.draw(st.sampled_from(sorted(CHAINS)))](2))
    for _ in range(data.draw(st.integers(1, 3))):
        holder, key = data.draw(st.sampled_from(places_in(document)))
        holder[key] = data.draw(JUNK)
    before = copy.deepcopy(document)
    for act in (
        find_segments,
        dead_shells,
        lambda broken: switch(broken, mute=["3"], bypass=["ImageBatch"]),
        lambda broken: keep_segments(broken, 1, object_info=OBJECT_INFO),
    ):
        with contextlib.suppress(FleetError):
            act(document)
    assert document == before
