"""Properties are checked against their document before anything is written."""

import copy
from typing import Any

import pytest
from tests.support.jobs.workflows import (
    HOW,
    INPUT,
    OBJECT_INFO,
    PROMPT,
    PROPERTIES,
    SAMPLER,
    STEPS,
    WHAT,
    drafted,
)

from comfyfleet.errors import InvalidInput, InvalidWorkflow
from comfyfleet.server.catalog.draft import draft_workflow
from comfyfleet.server.catalog.model import Property
from comfyfleet.server.catalog.service import engine_object_info
from comfyfleet.server.fleets.model import ModelUse


def test_a_draft_knows_what_its_prompt_needs() -> None:
    made = drafted(*PROPERTIES)
    assert made.kind == "prompt"
    assert made.node_types == (
        "CLIPTextEncode", "CheckpointLoaderSimple", "KSampler", "LoadImage", "LoraLoader",
        "SaveImage",
    )  # fmt: skip
    assert made.models == (
        ModelUse("CheckpointLoaderSimple.ckpt_name", "sdxl.safetensors"),
        ModelUse("LoraLoader.lora_name", "fine.safetensors"),
    )
    assert made.warnings == ()
    assert made.document_key == f"central/workflows/photo/{made.document_hash}.json"


def test_the_document_that_came_in_is_not_changed() -> None:
    before = copy.deepcopy(PROMPT)
    drafted(*PROPERTIES)
    assert before == PROMPT


def test_a_model_that_a_default_replaces_is_not_needed() -> None:
    model = Property("model", "choice", binding="1.ckpt_name", default="sd15.safetensors")
    files = [use.file for use in drafted(model, WHAT, HOW, STEPS).models]
    assert files == ["sd15.safetensors", "fine.safetensors"]


def test_choices_and_ranges_are_those_of_the_node_unless_given() -> None:
    steps = Property("steps", "integer", binding="5.steps", maximum=50)
    made = {each.name: each for each in drafted(SAMPLER, steps).properties}
    assert made["sampler"].choices == ("euler", "dpmpp_2m")
    assert (made["steps"].minimum, made["steps"].maximum) == (1, 50)


def test_files_and_placeholders_without_a_default_are_required() -> None:
    what = Property("what", "text", placeholder="__WHAT__")
    kept = Property("kept", "text", binding="9.filename_prefix")
    seed = Property("seed", "seed", placeholder="__STEPS__")
    made = {each.name: each.required for each in drafted(INPUT, what, kept, seed).properties}
    assert made == {"input": True, "what": True, "kept": False, "seed": False}


REFUSED: list[tuple[Property, str, str | None]] = [
    (Property("x", "text", binding="77.text"), 'no node has the id, title or class "77"', "77"),
    (Property("x", "text", binding="4.txt"), "no input 'txt'.*text", "4"),
    (Property("x", "text", binding="4"), "must have the form <node id>.<input>", None),
    (Property("x", "text", binding="4."), "no node", "4"),
    (Property("x", "image", binding="5.latent_image"), "accepts IMAGE from another node", "5"),
    (
        Property("x", "text", placeholder="nowhere to be found"),
        "the document doesn't contain",
        None,
    ),
    (Property("x", "text", placeholder="CLIPTextEncode"), "the document doesn't contain", None),
    (Property("x", "text"), "either a binding", None),
    (Property("x", "text", binding="4.text", placeholder="__WHAT__"), "either a binding", None),
    (Property("", "text", binding="4.text"), "the name must begin", None),
    (Property("x", "text", binding="4.text", default=5), "invalid default.*is not a string", "4"),
    (Property("x", "integer", binding="5.steps", default=0), "below the minimum of 1", "5"),
    (Property("x", "choice", binding="5.sampler_name", default="e"), "among the choices", "5"),
    (Property("x", "choice", binding="9.filename_prefix"), "must have choices", "9"),
    (Property("x", "text", binding="4.text", choices=("a",)), "can't have choices", None),
    (Property("x", "text", binding="4.text", maximum=5), "has no range", None),
    (Property("x", "number", binding="5.steps", minimum=5, maximum=1), "above the maximum", None),
    (Property("x", "number", binding="5.steps", step=0), "step must be above zero", None),
    (Property("x", "seed", binding="5.seed", maximum=2**65), "seeds must be between 0 and", None),
    (Property("x", "text", placeholder="__WHAT__", required=False), "or have a default", None),
    (Property("x", "words", binding="4.text"), "unknown type", None),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("wrong", "message", "node"), REFUSED)
def test_a_property_that_does_not_fit_is_named_with_its_node(
    wrong: Property, message: str, node: str | None
) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        drafted(wrong)
    assert refused.value.details["property"] == wrong.name
    assert refused.value.details["node"] == node
    assert f"the property {wrong.name}" in refused.value.message


@pytest.mark.parametrize(
    ("twice", "what"),
    [
        (Property("what", "text", binding="4.text"), "name 'what'"),
        (Property("other", "text", placeholder="__WHAT__"), "placeholder '__WHAT__'"),
    ],
)
def test_a_name_or_a_place_belongs_to_one_property(twice: Property, what: str) -> None:
    with pytest.raises(InvalidInput, match=what):
        drafted(WHAT, twice)


@pytest.mark.parametrize(
    ("output", "message"), [("77", "not in the prompt"), ("4", "isn't an output node")]
)
def test_an_output_node_must_be_one(output: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        drafted(output_node_id=output)
    assert refused.value.details["field"] == "output_node_id"


@pytest.mark.parametrize(
    "document", [{}, [], "text", 5, {"nodes": []}, {"1": {"inputs": {}}}, {"a": float("nan")}]
)
def test_what_is_no_document_is_refused(document: Any) -> None:
    with pytest.raises(InvalidInput):
        drafted(document=document, output_node_id=None)


def test_a_prompt_with_a_broken_node_is_refused() -> None:
    with pytest.raises(InvalidWorkflow, match=r"'2'.*class_type"):
        drafted(document={"1": PROMPT["1"], "2": {}}, output_node_id=None)


def test_a_document_that_no_database_could_keep_is_refused() -> None:
    for text in ("a\0b", "\ud800"):
        document = {"4": {"class_type": "CLIPTextEncode", "inputs": {"text": text}}}
        with pytest.raises(InvalidInput, match="invalid document"):
            drafted(document=document, output_node_id=None)
    about_nul = {"4": {"class_type": "CLIPTextEncode", "inputs": {"text": "a\\u0000b"}}}
    assert drafted(document=about_nul, output_node_id=None)


def test_node_types_that_nobody_knows_are_told_and_not_refused() -> None:
    known = {name: entry for name, entry in OBJECT_INFO.items() if name != "KSampler"}
    anything = Property("anything", "text", binding="5.whatever")
    made = drafted(anything, object_info=known)
    assert made.warnings == ("No known backend has the node types KSampler.",)


def test_a_node_id_and_an_input_may_both_hold_dots() -> None:
    document = {"a.b": {"class_type": "Unknown", "inputs": {"x.y": "old"}}}
    assert drafted(Property("x", "text", binding="a.b.x.y"), document=document, output_node_id=None)


def test_a_binding_that_is_none_is_told_with_all_that_could_be_bound() -> None:
    prompt = {"2": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64}}}
    with pytest.raises(InvalidInput) as refused:
        draft_workflow(
            slug="x",
            document={**prompt, "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 0]}}},
            properties=[Property("depth", "integer", binding="2.depth")],
            output_node_id=None,
            object_info=engine_object_info(),
        )
    for name in ("width", "height", "batch_size", "color"):
        assert f'"{name}"' in refused.value.message
