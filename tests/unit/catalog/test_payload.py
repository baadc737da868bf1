"""What a job runs: values go in as values, and nowhere else."""

import copy
import json
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.jobs.workflows import OBJECT_INFO, PROMPT, PROPERTIES, WHAT, drafted, versioned

from comfyfleet.errors import InvalidValue
from comfyfleet.server.catalog.model import AssetRef, JobPayload, Property
from comfyfleet.server.catalog.payload import build_payload

FILE = UUID("6f1b8ad2-3df4-4a0c-9d0c-0a4d5ac6b6a1")
VERSION = versioned(drafted(*PROPERTIES))
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60)


def built(values: dict[str, Any] | None = None, **overrides: Any) -> JobPayload:
    given_values = {"input": str(FILE), **(values or {})}
    return build_payload(VERSION, PROMPT, OBJECT_INFO, given_values, overrides, seed=123)


def one_node(value: Any, *properties: Property, **values: Any) -> JobPayload:
    document = {"1": {"class_type": "Any", "inputs": {"value": value, "other": "stays"}}}
    version = versioned(drafted(*properties, document=document, output_node_id=None))
    before = copy.deepcopy(document)
    payload = build_payload(version, document, {}, values, {}, seed=1)
    assert document == before
    return payload


def test_defaults_fill_what_nobody_says() -> None:
    payload = built()
    assert payload.prompt["4"]["inputs"]["text"] == "a photo of a cat, sharp"
    assert payload.prompt["5"]["inputs"]["steps"] == 20
    assert payload.prompt["5"]["inputs"]["seed"] == 123
    assert payload.prompt["5"]["inputs"]["sampler_name"] == "euler"
    assert payload.properties == {
        "input": str(FILE),
        "what": "a cat",
        "how": "sharp",
        "steps": 20,
        "seed": 123,
    }


def test_the_user_goes_before_the_effect_and_the_effect_before_the_default() -> None:
    payload = built({"what": "a dog"}, what="a bird", steps=5)
    assert payload.prompt["4"]["inputs"]["text"] == "a photo of a dog, sharp"
    assert payload.prompt["5"]["inputs"]["steps"] == 5
    nothing_said = built({"what": None}, what="a bird")
    assert nothing_said.properties["what"] == "a bird"


def test_a_file_is_bound_to_its_input_and_the_one_named_input_is_primary() -> None:
    assert built().assets == (AssetRef("input", FILE, "image", "3.image", None, True),)


def test_files_may_also_be_given_apart() -> None:
    payload = build_payload(VERSION, PROMPT, OBJECT_INFO, {}, {}, files={"input": FILE}, seed=1)
    assert payload.assets[0].file_id == FILE


def test_a_seed_is_kept_within_its_range() -> None:
    dice = Property("dice", "seed", binding="1.value", minimum=1, maximum=6)
    document = {"1": {"class_type": "Any", "inputs": {"value": 0}}}
    version = versioned(drafted(dice, document=document, output_node_id=None))
    rolled = {
        build_payload(version, document, {}, {}, {}, seed=seed).properties["dice"]
        for seed in range(50)
    }
    assert rolled == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("what", 5, "is not a string"),
        ("what", "a\0b", "NUL"),
        ("what", "\ud800", "half a character"),
        ("steps", "5", "is not a number"),
        ("steps", 5.5, "not a whole number"),
        ("steps", True, "is not a number"),
        ("steps", 51, "above the maximum of 50"),
        ("steps", 10**400, "is not a number"),
        ("strength", float("nan"), "is not a number"),
        ("strength", -21, "below the minimum"),
        ("sampler", "elsewhere", "is not among the choices: 'euler', 'dpmpp_2m'"),
        ("seed", -1, "a seed must be between 0 and"),
        ("seed", 2**64, "a seed must be between 0 and"),
        ("input", "example.png", "is not a file id"),
        ("nothing", 1, "unknown property 'nothing'; available properties: input, what"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidValue, match=message) as refused:
        built({name: value})
    assert refused.value.details["property"] == name
    assert name in refused.value.message


def test_the_override_of_an_effect_is_held_to_the_same_rules() -> None:
    with pytest.raises(InvalidValue, match="steps"):
        built(steps=1000)


def test_what_is_required_must_be_given() -> None:
    with pytest.raises(InvalidValue, match="input needs a value"):
        build_payload(VERSION, PROMPT, OBJECT_INFO, {}, {}, seed=1)


def test_a_whole_number_may_be_written_as_a_decimal() -> None:
    assert built({"steps": 7.0}).properties["steps"] == 7


def test_an_effect_may_name_a_file_that_the_backend_has() -> None:
    payload = build_payload(VERSION, PROMPT, OBJECT_INFO, {}, {"input": "example.png"}, seed=1)
    assert payload.assets == ()
    assert payload.prompt["3"]["inputs"]["image"] == "example.png"


def test_the_heavy_model_is_the_checkpoint_and_the_set_does_not_depend_on_order() -> None:
    payload = built()
    assert payload.model_key == "sdxl.safetensors"
    turned = dict(reversed(PROMPT.items()))
    again = build_payload(VERSION, turned, OBJECT_INFO, {"input": FILE}, {}, seed=1)
    assert again.model_set == payload.model_set
    assert len(payload.model_set or "") == 64
    other = Property("model", "choice", binding="1.ckpt_name")
    version = versioned(drafted(other, WHAT))
    changed = build_payload(version, PROMPT, OBJECT_INFO, {"model": "sd15.safetensors"}, {}, seed=1)
    assert changed.model_key == "sd15.safetensors"
    assert changed.model_set != payload.model_set


def test_a_prompt_without_models_has_neither_key_nor_set() -> None:
    payload = one_node("x", Property("x", "text", binding="1.value"), x="y")
    assert (payload.model_key, payload.model_set) == (None, None)


def test_a_placeholder_that_is_the_whole_value_becomes_a_value_of_its_type() -> None:
    for value, kind in ((5, "integer"), (2.5, "number"), (True, "boolean")):
        each = Property("x", kind, placeholder="%x%")  # type: ignore[arg-type]
        assert one_node("%x%", each, x=value).prompt["1"]["inputs"]["value"] == value
        inside = one_node("is %x%!", each, x=value).prompt["1"]["inputs"]["value"]
        assert inside == f"is {json.dumps(value)}!"


def test_the_longer_of_two_placeholders_is_meant() -> None:
    short, long = (Property(name, "text", placeholder=name) for name in ("PROMPT", "PROMPT_2"))
    payload = one_node("PROMPT PROMPT_2", short, long, PROMPT="a", PROMPT_2="b")
    assert payload.prompt["1"]["inputs"]["value"] == "a b"


def test_placeholders_inside_of_lists_and_objects_are_found() -> None:
    each = Property("x", "text", placeholder="X")
    payload = one_node({"on": True, "lora": ["X", "a X"]}, each, x="new")
    assert payload.prompt["1"]["inputs"]["value"] == {"on": True, "lora": ["new", "a new"]}


def test_links_and_class_names_are_never_replaced() -> None:
    document = {
        "4": {"class_type": "X", "inputs": {"value": "4"}},
        "5": {"class_type": "4", "inputs": {"a": ["4", 0]}},
    }
    each = Property("x", "text", placeholder="4")
    version = versioned(drafted(each, document=document, output_node_id=None))
    payload = build_payload(version, document, {}, {"x": "new"}, {}, seed=1)
    assert payload.prompt == {
        "4": {"class_type": "X", "inputs": {"value": "new"}},
        "5": {"class_type": "4", "inputs": {"a": ["4", 0]}},
    }


def test_a_files_placeholder_is_bound_to_where_it_stands() -> None:
    each = Property("clip", "video", placeholder="FILE")
    document = {
        "1": {"class_type": "Load", "inputs": {"video": "FILE"}},
        "2": {"class_type": "Load", "inputs": {"video": "FILE"}},
    }
    version = versioned(drafted(each, document=document, output_node_id=None))
    payload = build_payload(version, document, {}, {"clip": str(FILE)}, {}, seed=1)
    assert [(ref.name, ref.binding) for ref in payload.assets] == [
        ("clip", "1.video"),
        ("clip#2", "2.video"),
    ]


def test_a_files_placeholder_inside_a_text_is_left_to_the_worker_and_kept_from_users() -> None:
    clip = Property("clip", "video", placeholder="FILE")
    note = Property("note", "text", binding="1.other")
    (ref,) = one_node("folder/FILE", clip, clip=str(FILE)).assets
    assert (ref.binding, ref.placeholder) == (None, "FILE")
    with pytest.raises(InvalidValue, match="placeholder of a file"):
        one_node("folder/FILE", clip, note, clip=str(uuid4()), note="my FILE")


@given(what=texts, how=texts)
def test_any_text_goes_in_as_it_is_and_changes_nothing_else(what: str, how: str) -> None:
    payload = built({"what": what, "how": how})
    assert payload.prompt["4"]["inputs"]["text"] == f"a photo of {what}, {how}"
    rest = {**payload.prompt, "4": None}
    assert rest == {**built().prompt, "4": None}
    assert json.loads(json.dumps(payload.prompt)) == payload.prompt


@given(first=st.sampled_from(["__WHAT__", "{__HOW__}", '"}', "\\", "\ue000comfyfleet-0\ue001"]))
def test_a_text_that_looks_like_a_placeholder_is_only_a_text(first: str) -> None:
    payload = built({"what": first, "how": "__WHAT__"})
    assert payload.prompt["4"]["inputs"]["text"] == f"a photo of {first}, __WHAT__"


@given(
    value=st.one_of(
        texts.map(lambda text: ("text", text)),
        st.integers(-(2**70), 2**70).map(lambda number: ("integer", number)),
        st.floats(allow_nan=False, allow_infinity=False).map(lambda number: ("number", number)),
        st.booleans().map(lambda truth: ("boolean", truth)),
        st.integers(0, 2**64 - 1).map(lambda seed: ("seed", seed)),
    ),
    by=st.sampled_from([{"binding": "1.value"}, {"placeholder": "@@"}]),
)
@settings(max_examples=150)
def test_any_value_comes_out_of_the_prompt_as_it_went_in(
    value: tuple[Any, Any], by: dict[str, str]
) -> None:
    kind, wanted = value
    each = replace(Property("x", kind), **by)  # type: ignore[arg-type]
    found = one_node("@@", each, x=wanted).prompt["1"]["inputs"]
    assert found == {"value": wanted, "other": "stays"}
    assert type(found["value"]) is type(wanted)


@given(placeholder=texts.filter(bool), value=texts, before=texts, after=texts)
def test_any_text_may_be_a_placeholder(
    placeholder: str, value: str, before: str, after: str
) -> None:
    each = Property("x", "text", placeholder=placeholder)
    document = before.replace(placeholder, "") + placeholder + after.replace(placeholder, "")
    if document.count(placeholder) != 1 or placeholder in "stays":
        return
    found = one_node(document, each, x=value).prompt["1"]["inputs"]["value"]
    start = document.index(placeholder)
    assert found == document[:start] + value + document[start + len(placeholder) :]
