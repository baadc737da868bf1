"""Which prompts contain a workflow: by the types of nodes and the links between them."""

import time
from typing import Any

import pytest

from comfyfleet.server.gateway.containment import (
    COMPARISONS_MAX,
    index_prompt,
    is_contained,
    pattern_of,
)

INFO: dict[str, Any] = {
    "SaveImage": {"output_node": True},
    "PreviewImage": {"output_node": True},
    "Model": {"output_node": True, "output": ["MESH"]},
    "Upload": {"input": {"required": {"image": [["a.png"], {"image_upload": True}]}}},
}


GROWING_IMAGES = [
    "COMFY_AUTOGROW_V3",
    {"template": {"input": {"required": {"image": ["IMAGE", {}]}}, "prefix": "image", "min": 1}},
]
INFO["Batch"] = {"input": {"required": {"images": GROWING_IMAGES}}}
INFO["Rows"] = {
    "input": {
        "required": {
            "rows": [
                "COMFY_DYNAMICGROUP_V3",
                {"template": {"required": {"image": ["IMAGE", {}]}}, "min": 1},
            ]
        }
    }
}
INFO["Mode"] = {
    "input": {
        "required": {
            "mode": [
                "COMFY_DYNAMICCOMBO_V3",
                {"options": [{"key": "all", "inputs": {"required": {"images": GROWING_IMAGES}}}]},
            ]
        }
    }
}


INT, STRING = ["INT", {}], ["STRING", {}]
INFO["PrimitiveInt"] = {"input": {"required": {"value": INT}}, "output": ["INT"]}
INFO["StringConcatenate"] = {
    "input": {"required": {"string_a": STRING, "string_b": STRING}},
    "output": ["STRING"],
}
INFO["GetImageSize"] = {"input": {"required": {"image": ["IMAGE", {}]}}, "output": ["INT", "INT"]}
INFO["Poem"] = {"input": {"required": {"about": STRING}}, "output": ["STRING"]}


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


WORKFLOW = {
    "1": node("Load", image="a.png"),
    "2": node("Blend", first=["1", 0], second=["1", 0], factor=0.5),
    "3": node("SaveImage", images=["2", 0], filename_prefix="x"),
}


def contains(
    prompt: dict[str, Any], workflow: dict[str, Any] = WORKFLOW, output: str | None = None
) -> bool:
    pattern = pattern_of(workflow, INFO, output)
    assert pattern is not None
    indexed = index_prompt(prompt, INFO)
    found = is_contained(pattern, indexed)
    assert not found or pattern.comparisons(indexed), "it would never have been compared"
    return found


def changed(**nodes: Any) -> dict[str, Any]:
    return {**WORKFLOW, **nodes}


SAME_BY_OTHER_NAMES = {
    "c": node("SaveImage", images=["b", 0], filename_prefix="y"),
    "b": node("Blend", first=["a", 0], second=["a", 0], factor=["f", 1]),
    "a": node("Load", image="b.png"),
    "f": node("Number", value=0.1),
}
CONTAINING = {
    "itself": WORKFLOW,
    "other ids, values and order, a value by a link": SAME_BY_OTHER_NAMES,
    "a node beside it": changed(**{"4": node("PreviewImage", images=["1", 0])}),
    "a node after it": changed(
        **{"4": node("Crop", image=["2", 0]), "5": node("SaveImage", images=["4", 0])}
    ),
    "another output node": changed(**{"3": node("PreviewImage", pictures=["2", 0])}),
    "a node twice instead of shared": changed(
        **{
            "0": node("Load", image="a.png"),
            "2": node("Blend", first=["1", 0], second=["0", 0]),
        }
    ),
    "another input that is linked, too": changed(
        **{"2": node("Blend", first=["1", 0], second=["1", 0], mask=["1", 1])}
    ),
}
NOT_CONTAINING = {
    "a node inserted into it": changed(
        **{"4": node("Invert", image=["1", 0]), "2": node("Blend", first=["4", 0], second=["1", 0])}
    ),
    "another output of a node": changed(**{"2": node("Blend", first=["1", 1], second=["1", 0])}),
    "a link to another input": changed(**{"2": node("Blend", first=["1", 0], third=["1", 0])}),
    "a missing link": changed(**{"2": node("Blend", first=["1", 0], second="none")}),
    "another type": changed(**{"1": node("Empty", width=8)}),
    "no output that takes from it": changed(**{"3": node("SaveImage", images=["1", 0])}),
    "nothing": {},
}


@pytest.mark.parametrize("name", CONTAINING)
def test_a_workflow_is_contained_with(name: str) -> None:
    assert contains(CONTAINING[name])


@pytest.mark.parametrize("name", NOT_CONTAINING)
def test_a_workflow_is_not_contained_with(name: str) -> None:
    assert not contains(NOT_CONTAINING[name])


def test_a_part_of_a_workflow_does_not_contain_it() -> None:
    longer = changed(**{"4": node("Crop", image=["2", 0]), "5": node("SaveImage", images=["4", 0])})
    assert not contains(WORKFLOW, longer, "5")
    del longer["3"]
    assert not contains(WORKFLOW, longer)


SHOWN = changed(**{"4": node("PreviewImage", images=["1", 0])})
WITH_DETAIL = changed(
    **{"4": node("Crop", image=["1", 0]), "5": node("PreviewImage", images=["4", 0])}
)
DETAIL = {each: WITH_DETAIL[each] for each in ("1", "4", "5")}
UPLOADED = {
    "1": node("Upload", image="a.png"),
    "2": node("PreviewImage", images=["1", 0]),
    "3": node("Blend", first=["1", 0], second=["1", 0]),
    "4": node("SaveImage", images=["3", 0]),
}
UPLOAD_SHOWN = {each: UPLOADED[each] for each in ("1", "2")}


@pytest.mark.parametrize("workflow", [SHOWN, WITH_DETAIL])
@pytest.mark.parametrize("output", [None, "3"])
def test_a_workflow_is_contained_without_its_side_output(
    workflow: dict[str, Any], output: str | None
) -> None:
    assert contains(WORKFLOW, workflow, output)


def test_any_output_counts_unless_one_is_registered() -> None:
    assert contains(DETAIL, WITH_DETAIL)
    assert not contains(DETAIL, WITH_DETAIL, "3")
    assert contains(DETAIL, WITH_DETAIL, "gone")


def test_a_look_at_an_uploaded_file_is_no_result() -> None:
    assert not contains(UPLOAD_SHOWN, UPLOADED)
    assert contains({each: UPLOADED[each] for each in ("1", "3", "4")}, UPLOADED)
    assert contains(UPLOAD_SHOWN, UPLOAD_SHOWN), "it has no other result"


def test_an_output_node_that_makes_something_of_an_uploaded_file_is_a_result() -> None:
    made = {"1": UPLOADED["1"], "2": node("Model", image=["1", 0])}
    assert contains(made, {**made, "3": node("SaveImage", mesh=["2", 0])})


def test_results_that_can_not_be_made_are_not_counted_as_comparisons() -> None:
    pattern = pattern_of(WITH_DETAIL, INFO)
    assert pattern is not None
    assert pattern.comparisons(index_prompt({"1": node("Load")}, INFO)) == 0


def batch(class_type: str, name: str, **more: Any) -> dict[str, Any]:
    """A workflow with a growing input, one slot of which has this name."""
    return {
        "1": node("Load", image="a.png"),
        "2": node(class_type, **{name: ["1", 0], **more}),
        "3": node("SaveImage", images=["2", 0]),
    }


@pytest.mark.parametrize(("class_type", "group"), [("Batch", "images."), ("Mode", "mode.images.")])
def test_any_slot_of_a_growing_input_can_stand_for_another_one(class_type: str, group: str) -> None:
    workflow = batch(class_type, f"{group}image0")
    assert contains(batch(class_type, f"{group}image2"), workflow)
    other = batch(class_type, f"{group}image1", **{f"{group}image0": ["9", 0]})
    assert contains({**other, "9": node("Other")}, workflow)
    assert not contains(batch(class_type, "mask"), workflow)
    other_source = {**batch(class_type, f"{group}image0"), "1": node("Other")}
    assert not contains(other_source, workflow)


def test_any_row_of_a_group_can_stand_for_another_one() -> None:
    assert contains(batch("Rows", "rows.1.image"), batch("Rows", "rows.0.image"))


def test_the_slots_of_a_growing_input_count_as_comparisons() -> None:
    slots = {f"images.image{at}": ["1", 0] for at in range(1, 500)}
    wide = batch("Batch", "images.image0", **slots)
    pattern = pattern_of(wide, INFO)
    assert pattern is not None
    assert pattern.comparisons(index_prompt(wide, INFO)) > 500 * 500


def test_a_workflow_with_a_cycle_or_without_nodes_has_no_pattern() -> None:
    assert pattern_of({"1": node("A", x=["2", 0]), "2": node("A", x=["1", 0])}, INFO) is None
    assert pattern_of({"1": node("A", x=["gone", 0])}, INFO) is None
    assert pattern_of({}, INFO) is None


def test_a_prompt_with_a_cycle_is_compared_all_the_same() -> None:
    assert not contains({"1": node("Load"), "2": node("Blend", first=["2", 0], second=["2", 0])})


def chain(length: int) -> dict[str, Any]:
    nodes = {str(at): node("Step", image=[str(at - 1), 0]) for at in range(1, length)}
    return {"0": node("Load"), **nodes, "end": node("SaveImage", images=[str(length - 1), 0])}


def test_the_work_is_known_before_it_starts_and_stays_small() -> None:
    prompt, workflow = index_prompt(chain(500), INFO), pattern_of(chain(400), INFO)
    assert workflow is not None
    assert 200_000 < workflow.comparisons(prompt) < COMPARISONS_MAX
    begun = time.process_time()
    is_contained(workflow, prompt)
    assert time.process_time() - begun < 5
    large = index_prompt(chain(2_000), INFO)
    assert workflow.comparisons(large) > COMPARISONS_MAX


def test_nodes_that_only_compute_values_can_be_replaced_by_the_values() -> None:
    computed = changed(
        **{
            "2": node("Blend", first=["1", 0], second=["1", 0], factor=["5", 0]),
            "3": node("SaveImage", images=["2", 0], filename_prefix=["7", 0]),
            "5": node("PrimitiveInt", value=1),
            "6": node("StringConcatenate", string_a="a", string_b="b"),
            "7": node("StringConcatenate", string_a=["6", 0], string_b="c"),
        }
    )
    assert contains(WORKFLOW, computed)
    assert contains(computed, computed)
    assert contains(computed, WORKFLOW)


@pytest.mark.parametrize("source", ["GetImageSize", "Poem"])
def test_values_that_a_node_gets_from_elsewhere_are_a_part_of_the_workflow(source: str) -> None:
    inputs = {"image": ["1", 0]} if source == "GetImageSize" else {"about": "a cat"}
    made = changed(
        **{
            "2": node("Blend", first=["1", 0], second=["1", 0], factor=["6", 0]),
            "5": node(source, **inputs),
            "6": node("StringConcatenate", string_a=["5", 0], string_b="c"),
        }
    )
    assert not contains(WORKFLOW, made)
    assert contains(made, made)


def test_a_workflow_that_shows_a_value_is_not_a_part_of_every_prompt() -> None:
    shows = {"1": node("PrimitiveInt", value=1), "2": node("PreviewImage", source=["1", 0])}
    assert contains(shows, shows)
    assert not contains(WORKFLOW, shows)
