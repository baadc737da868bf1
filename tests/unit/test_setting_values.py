"""Values are set by the names that a person sees, all of them or none."""

import copy
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.small_server import OBJECT_INFO, node, text_to_image

from comfyfleet.errors import InvalidInput, InvalidValue, InvalidWorkflow, LimitExceeded
from comfyfleet.workflow.edit import Assignment, Edit, parse_assignment, set_values
from comfyfleet.workflow.edit.values import ASSIGNMENTS_MAX, PROBLEMS_MAX


def set_in(prompt: dict[str, Any], *texts: str, check: bool = True) -> Edit:
    return set_values(prompt, OBJECT_INFO, [parse_assignment(text) for text in texts], check=check)


def painted(text: str, **inputs: Any) -> Any:
    """The value that a Paint node has of an input after `text` was assigned to it."""
    edit = set_in({"1": node("Paint", **inputs)}, f"1.{text}")
    return edit.prompt["1"]["inputs"][text.partition("=")[0]]


def resized(*texts: str, **inputs: Any) -> Edit:
    kept = {"resize_type": "scale dimensions", **inputs}
    return set_in({"1": node("ResizeImage", **kept)}, *texts)


@pytest.mark.parametrize("target", ["3", "Main sampler", "KSampler"])
def test_a_node_is_named_by_id_title_or_class(target: str) -> None:
    edit = set_in(text_to_image(), f"{target}.seed=7")
    assert edit.prompt["3"]["inputs"]["seed"] == 7
    assert edit.done == ('3 KSampler "Main sampler": seed 5 → 7',)
    assert edit.warnings == ()


def test_a_title_may_hold_dots_and_spaces() -> None:
    edit = set_in(text_to_image(), "Wishes v1.5.text=a = b")
    assert edit.prompt["6"]["inputs"]["text"] == "a = b"


def test_a_node_without_a_title_has_that_of_its_class() -> None:
    edit = set_in(text_to_image(), "Load Checkpoint.ckpt_name=sdxl/base.safetensors")
    assert edit.done == (
        '4 CheckpointLoaderSimple: ckpt_name "v1-5.safetensors" → "sdxl/base.safetensors"',
    )


def test_an_id_goes_before_a_title_and_a_title_before_a_class() -> None:
    prompt = {
        "1": node("KSampler", "2", seed=0),
        "2": node("KSampler", "KSampler", seed=0),
    }
    edit = set_in(prompt, "2.seed=7", "KSampler.seed=8")
    assert edit.prompt["1"]["inputs"]["seed"] == 0
    assert edit.prompt["2"]["inputs"]["seed"] == 8


def test_an_inner_node_is_named_by_its_long_id() -> None:
    prompt = {"57:3": node("KSampler", seed=1)}
    assert set_in(prompt, "57:3.seed=2").prompt["57:3"]["inputs"]["seed"] == 2


def test_of_equal_titles_the_one_that_has_the_input_is_meant() -> None:
    prompt = {
        "1": node("KSampler", "Model", seed=0),
        "2": node("CheckpointLoaderSimple", "Model", ckpt_name="v1-5.safetensors"),
    }
    assert set_in(prompt, "Model.seed=3").prompt["1"]["inputs"]["seed"] == 3


def test_an_ambiguous_name_lists_whom_it_could_mean() -> None:
    with pytest.raises(InvalidInput) as caught:
        set_in(text_to_image(), "CLIPTextEncode.text=x")
    assert caught.value.message == (
        '"CLIPTextEncode.text" is ambiguous: 6.text (6 CLIPTextEncode "Wishes v1.5", now "a cat"), '
        '7.text (7 CLIPTextEncode "Fears", now "a dog")'
    )


def test_an_unknown_node_lists_the_closest() -> None:
    with pytest.raises(
        InvalidInput, match='no node has the id, title or class "Main samper"'
    ) as it:
        set_in(text_to_image(), "Main samper.seed=1")
    assert it.value.message.endswith('; closest: 3 KSampler "Main sampler"')


def test_an_unknown_input_lists_the_closest() -> None:
    with pytest.raises(InvalidInput) as caught:
        set_in(text_to_image(), "3.sampler=euler")
    assert caught.value.message.startswith(
        '3 KSampler "Main sampler" has no input "sampler"; closest: "sampler_name"'
    )


@pytest.mark.parametrize("text", ["3.seed", "seed=3", ".seed=3", "=", ""])
def test_a_text_that_assigns_nothing_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"such as 3\.seed=7"):
        parse_assignment(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("layers=3", 3),
        ("layers=3.0", 3),
        ("glow=Yes", True),
        ("glow=0", False),
        ("glow=false", False),
        ("color=000000", "000000"),
        ("size=4", 4),
        ('tags=["red", "blue"]', {"__value__": ["red", "blue"]}),
        ('box={"x": 1}', {"x": 1}),
        ("box=[1, 2]", {"__value__": [1, 2]}),
        ("anything=5", 5),
        ("anything=five", "five"),
    ],
)
def test_a_text_becomes_a_value_of_the_declared_type(text: str, value: Any) -> None:
    made = painted(text)
    assert (made, type(made)) == (value, type(value))


def test_a_large_seed_stays_exact() -> None:
    seed = 2**64 - 1
    assert set_in(text_to_image(), f"3.seed={seed}").prompt["3"]["inputs"]["seed"] == seed


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("layers=two", '"two" is not a whole number'),
        ("layers=2.5", '"2.5" is not a whole number'),
        ("layers=10", "10 is above the maximum of 9"),
        ("glow=maybe", '"maybe" is neither true nor false'),
        ("size=3", '"3" is not among the choices: "1", "2", "4"'),
        ("box=wide", '"wide" is not JSON, which BOUNDING_BOX requires'),
        ("color=\ud83d", "the text contains half a character (a lone surrogate)"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        painted(text)
    assert caught.value.message == f"1 Paint: {text.partition('=')[0]}: {problem}"


def test_several_mistakes_are_told_together() -> None:
    with pytest.raises(InvalidInput) as caught:
        set_in(text_to_image(), "3.seed=1", "3.steps=0", "12.seed=1", "3.sampler_name=eulr")
    assert len(caught.value.details["problems"]) == 3
    assert type(caught.value) is InvalidInput
    with pytest.raises(InvalidValue, match=r"minimum of 1\n.*closest"):
        set_in(text_to_image(), "3.steps=0", "3.sampler_name=eulr")


def test_unchecked_values_pass() -> None:
    edit = set_in(text_to_image(), "3.steps=0", "3.sampler_name=mine", "3.cfg=high", check=False)
    inputs = edit.prompt["3"]["inputs"]
    assert (inputs["steps"], inputs["sampler_name"], inputs["cfg"]) == (0, "mine", "high")


def test_a_link_that_gives_way_to_a_value_is_told() -> None:
    prompt = {**text_to_image(), "10": node("CustomCombo", "Wish", choice="a")}
    prompt["6"]["inputs"]["text"] = ["10", 0]
    edit = set_in(prompt, "6.text=a bird")
    assert edit.done == (
        '6 CLIPTextEncode "Wishes v1.5": text "a bird", instead of the link from '
        '10 CustomCombo "Wish"',
    )


def test_an_input_that_was_left_out_can_be_set() -> None:
    edit = set_in({"1": node("KSampler")}, "1.seed=4", "1.seed=4")
    assert edit.done == ("1 KSampler: seed 4", "1 KSampler: seed 4, as before")


def test_a_socket_takes_no_value() -> None:
    with pytest.raises(
        InvalidInput, match="model can't have a value; it only accepts a link of type MODEL"
    ):
        set_in(text_to_image(), "3.model=5")


def test_a_file_that_the_server_does_not_list_yet_can_be_named() -> None:
    edit = set_in({"1": node("LoadImage", image="cat.png")}, "1.image=new/dog.png")
    assert edit.prompt["1"]["inputs"]["image"] == "new/dog.png"


def test_another_choice_brings_the_inputs_of_its_branch() -> None:
    edit = resized(
        "1.resize_type=scale width",
        **{"resize_type.width": 640, "resize_type.height": 480, "resize_type.crop": "center"},
    )
    assert edit.prompt["1"]["inputs"] == {"resize_type": "scale width", "resize_type.width": 640}
    assert edit.done == (
        '1 ResizeImage: resize_type "scale dimensions" → "scale width"; '
        "gone: resize_type.height, resize_type.crop",
    )
    edit = resized("1.resize_type=scale by")
    assert edit.prompt["1"]["inputs"]["resize_type.multiplier"] == 2.0
    assert edit.done[0].endswith("; new: resize_type.multiplier 2.0")


def test_a_branch_can_be_chosen_and_filled_in_one_go() -> None:
    edit = resized("1.resize_type=scale by", "1.resize_type.multiplier=3")
    assert edit.prompt["1"]["inputs"]["resize_type.multiplier"] == 3.0
    with pytest.raises(InvalidInput, match=r'no input "resize_type\.multiplier"'):
        resized("1.resize_type.multiplier=3")


def test_a_socket_of_a_branch_gets_no_value() -> None:
    assert resized("1.resize_type=match size").prompt["1"]["inputs"] == {
        "resize_type": "match size"
    }


def test_a_combo_that_holds_its_own_options_is_checked_against_them() -> None:
    prompt = {"1": node("CustomCombo", choice="a", index=0, option1="a", option2="b", option3="")}
    assert set_in(prompt, "1.choice=b").prompt["1"]["inputs"]["index"] == 1
    with pytest.raises(InvalidValue):
        set_in(prompt, "1.choice=c")


def test_a_class_that_the_server_lacks_is_read_by_the_values_it_has() -> None:
    prompt = {"1": node("Unheard", count=1, rate=0.5, on=True, name="x", list={"__value__": [1]})}
    edit = set_in(prompt, "1.count=2", "1.rate=2", "1.on=no", "1.name=3", "1.list=[4]")
    assert edit.prompt["1"]["inputs"] == {
        "count": 2, "rate": 2.0, "on": False, "name": "3", "list": {"__value__": [4]},
    }  # fmt: skip
    assert edit.warnings[0] == (
        "1 Unheard: count is not checked, because the server lacks this class"
    )


def test_values_that_are_no_texts_are_copied_in() -> None:
    box = {"x": [1]}
    edit = set_values({"1": node("Paint")}, OBJECT_INFO, [Assignment("1.box", box)])
    assert edit.prompt["1"]["inputs"]["box"] == box
    assert edit.prompt["1"]["inputs"]["box"] is not box
    with pytest.raises(InvalidValue, match="can't be written as JSON"):
        set_values({"1": node("Paint")}, OBJECT_INFO, [Assignment("1.box", float("nan"))])


def test_the_prompt_that_came_in_stays_as_it_was() -> None:
    prompt = text_to_image()
    edit = set_in(prompt, "3.seed=7", "6.text=x")
    assert prompt == text_to_image()
    assert edit.prompt["9"] is prompt["9"], "what was not changed is shared"
    assert list(edit.prompt) == list(prompt)


def test_a_document_that_is_no_prompt_is_refused() -> None:
    with pytest.raises(
        InvalidWorkflow, match='node "nodes" of the prompt has no `inputs` object: a list'
    ):
        set_in({"nodes": []}, "3.seed=1")


def test_the_number_of_assignments_is_limited() -> None:
    too_many = [Assignment("3.seed", 1)] * (ASSIGNMENTS_MAX + 1)
    with pytest.raises(LimitExceeded):
        set_values(text_to_image(), OBJECT_INFO, too_many)


def test_of_very_many_mistakes_only_some_are_told() -> None:
    with pytest.raises(InvalidInput) as caught:
        set_in(text_to_image(), *[f"{number}.seed=1" for number in range(100, 200)])
    assert len(caught.value.details["problems"]) == PROBLEMS_MAX + 1


NAMES = st.sampled_from(
    ["3", "Main sampler", "KSampler", "6", "CLIPTextEncode", "Paint", "1.2", ""]
)
INPUTS = st.sampled_from(
    ["seed", "steps", "sampler_name", "text", "model", "box", "resize_type.x", ""]
)
VALUES: st.SearchStrategy[Any] = st.sampled_from(
    ["", "1", "-1", "2.5", "euler", "[1]", '{"a": 1}', "\ud83d", None, 3, []]
)


@settings(max_examples=40)
@given(st.lists(st.tuples(NAMES, INPUTS, VALUES), max_size=4), st.booleans())
def test_whatever_is_assigned_the_input_is_not_modified(
    given_values: list[tuple[str, str, Any]], check: bool
) -> None:
    prompt = {**text_to_image(), "1.2": node("ResizeImage"), "12": node("Paint", box=[])}
    before = copy.deepcopy(prompt)
    assignments = [Assignment(f"{name}.{field}", value) for name, field, value in given_values]
    with suppress(InvalidInput):
        edit = set_values(prompt, OBJECT_INFO, assignments, check=check)
        assert len(edit.done) == len(assignments)
    assert prompt == before
