from typing import Any

import pytest
from tests.unit.workflow.builders import CLASSES, node, node_class, workflow

from comfyfleet.errors import LimitExceeded
from comfyfleet.workflow import convert
from comfyfleet.workflow.model import Limits, Node
from comfyfleet.workflow.object_info import NodeType, NodeTypes, ObjectInfo, read_node_type
from comfyfleet.workflow.widget_values import assign_widget_values


def assigned(kind: str | dict[str, Any], values: Any) -> dict[str, Any]:
    node_type = NodeTypes(CLASSES).get(kind) if isinstance(kind, str) else read_node_type("X", kind)
    assert isinstance(node_type, NodeType)
    return assign_widget_values(node_type, Node("1", node_type.name, values=values)).values


def test_values_are_dealt_in_order_and_the_control_takes_its_slot() -> None:
    values = assigned("Sampler", [7, "fixed", 30, "ddim", "a cat"])
    assert (values["seed"], values["steps"], values["method"], values["text"]) == (
        7,
        30,
        "ddim",
        "a cat",
    )


def test_a_list_without_the_control_slot_is_read_shifted() -> None:
    values = assigned("Sampler", [7, 30, "ddim", "a cat"])
    assert (values["steps"], values["method"], values["text"]) == ("ddim", "a cat", "")


@pytest.mark.parametrize("saved", [None, [], {"seed": 5}, 7])
def test_what_is_not_saved_in_order_has_its_default(saved: Any) -> None:
    assert assigned("Sampler", saved)["steps"] == 20


def test_a_longer_list_is_cut() -> None:
    assert assigned("Source", [1, 2, 3]) == {"size": 1}


def test_null_is_kept_for_numbers_and_becomes_the_first_choice_for_choices() -> None:
    values = assigned("Sampler", [None, None, None, None, None])
    assert (values["steps"], values["method"]) == (None, "euler")


def test_a_chosen_branch_brings_its_widgets_right_behind_the_choice() -> None:
    values = assigned("Resize", ["to", 640, 480, False])
    assert values == {"mode": "to", "mode.width": 640, "mode.height": 480, "smooth": False}


def test_an_unknown_branch_has_no_widgets_and_later_values_shift() -> None:
    assert assigned("Resize", ["gone", 640, 480, False]) == {"mode": "gone", "smooth": 640}


def test_a_null_branch_becomes_the_first_with_its_defaults() -> None:
    assert assigned("Resize", [None, False]) == {"mode": "by", "mode.factor": 2.0, "smooth": False}


def test_the_slot_of_an_input_that_became_a_socket_is_dropped_if_lengths_tell_so() -> None:
    declared = node_class({"a": ["INT", {"forceInput": True}], "b": ["INT", {}]})
    assert assigned(declared, [1, 2]) == {"b": 2}
    assert assigned(declared, [1]) == {"b": 1}


def test_an_optional_input_that_is_a_socket_by_default_is_one() -> None:
    declared = node_class({}, optional={"a": ["INT", {"defaultInput": True}], "b": ["INT", {}]})
    assert assigned(declared, [5]) == {"b": 5}


def test_an_upload_button_takes_a_slot_behind_all_others() -> None:
    declared = node_class({"image": [["a.png"], {"image_upload": True}]}, optional={"n": ["INT"]})
    assert assigned(declared, ["b.png", 3, "image"]) == {
        "image": "b.png",
        "n": 3,
        "upload": "image",
    }


def test_rows_of_a_group_are_as_many_as_saved() -> None:
    template = {"required": {"text": ["STRING", {}]}}
    declared = node_class({"rows": ["COMFY_DYNAMICGROUP_V3", {"template": template, "min": 1}]})
    assert assigned(declared, [2, "a", "b"]) == {"rows": 2, "rows.0.text": "a", "rows.1.text": "b"}


def test_more_rows_than_the_limit_are_refused() -> None:
    template = {"required": {"text": ["STRING", {}]}}
    declared = node_class({"rows": ["COMFY_DYNAMICGROUP_V3", {"template": template}]})
    node = Node("1", "X", values=[10_000_000])
    with pytest.raises(LimitExceeded, match="rows"):
        assign_widget_values(read_node_type("X", declared), node, limits=Limits(dynamic_rows_max=5))


def test_options_of_a_custom_combo_grow_as_they_are_filled() -> None:
    declared = {"CustomCombo": node_class({"choice": ["COMBO", {"options": []}]})}
    node_type = NodeTypes(declared).get("CustomCombo")
    assert node_type is not None
    values = assign_widget_values(
        node_type, Node("1", "CustomCombo", values=["b", 0, "a", "b"])
    ).values
    assert values == {"choice": "b", "option1": "a", "option2": "b", "option3": "", "index": 1}


def test_choices_that_are_kept_elsewhere_are_loading_until_they_are_given() -> None:
    info = {"R": node_class({"file": ["COMBO", {"remote": {"route": "/list"}}]})}
    for choices, expected in ((None, "Loading..."), (["x"], "x"), (["x", "b"], "b")):
        node_type = NodeTypes(info, {"/list": choices} if choices else None).get("R")
        assert node_type is not None
        assert (
            assign_widget_values(node_type, Node("1", "R", values=["b"])).values["file"] == expected
        )


def test_an_object_info_that_remembers_gives_the_same_types_again() -> None:
    info = ObjectInfo(CLASSES)
    assert NodeTypes(info).get("Sampler") is NodeTypes(info).get("Sampler")
    assert NodeTypes(dict(CLASSES)).get("Sampler") == NodeTypes(info).get("Sampler")


def test_a_widget_that_only_a_pack_draws_keeps_its_value() -> None:
    seconds = ["FLOAT", {"default": 0, "min": 0, "widgetType": "VHSTIMESTAMP"}]
    classes = {"VHS_LoadAudio": node_class({"audio_file": ["STRING", {}]}, "AUDIO", optional={"seek_seconds": seconds, "duration": seconds})}  # fmt: skip
    saved = {"audio_file": "a.wav", "seek_seconds": 1.5, "duration": 5}
    prompt = convert(workflow([node(1, "VHS_LoadAudio", widgets_values=saved)]), classes)
    assert prompt["1"]["inputs"] == saved


def test_an_own_type_without_a_widget_stays_a_socket() -> None:
    classes = {"Tick": node_class({"ticks": ["TICKS", {"widgetType": "CLOCK"}]}, "INT")}
    prompt = convert(workflow([node(1, "Tick", widgets_values=[3])]), classes)
    assert prompt["1"]["inputs"] == {}


def test_a_batch_manager_sends_its_count() -> None:
    classes = {"VHS_BatchManager": node_class({"frames_per_batch": ["INT", {"default": 16}]}, "VHS")}  # fmt: skip
    fresh = convert(workflow([node(1, "VHS_BatchManager", widgets_values={})]), classes)
    assert fresh["1"]["inputs"] == {"frames_per_batch": 16, "count": 0}
    used = node(1, "VHS_BatchManager", widgets_values={"frames_per_batch": 8, "count": 2})
    assert convert(workflow([used]), classes)["1"]["inputs"] == {"frames_per_batch": 8, "count": 2}
