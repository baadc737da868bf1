"""An editor's workflow is converted for the fleet that shall run it, placeholders and all."""

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tests.support.jobs.workflows import OBJECT_INFO, drafted, versioned

from comfyfleet.errors import InvalidInput, UnknownNodeTypes
from comfyfleet.server.catalog.draft import best_object_info
from comfyfleet.server.catalog.model import Property
from comfyfleet.server.catalog.payload import RandomSource, build_payload
from comfyfleet.server.catalog.service import engine_object_info
from comfyfleet.server.fleets.model import ModelUse

EXAMPLES = Path(__file__).parents[3] / "examples" / "workflows"


def example(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((EXAMPLES / f"{name}.json").read_text(encoding="utf-8"))
    return document


def a_node(node_id: int, kind: str, *values: Any) -> dict[str, Any]:
    return {"id": node_id, "type": kind, "inputs": [], "outputs": [], "widgets_values": [*values]}


def a_workflow(*nodes: dict[str, Any]) -> dict[str, Any]:
    return {"nodes": [*nodes], "links": [], "version": 0.4}


def test_the_examples_can_be_registered_with_the_engine_alone() -> None:
    source = Property("input", "image", binding="1.image")
    side = Property("side", "integer", binding="6.resize_type.longer_size", default=128)
    made = drafted(
        source,
        side,
        document=example("soften"),
        output_node_id="7",
        object_info=engine_object_info(),
    )
    assert made.kind == "workflow"
    assert made.warnings == ()
    payload = build_payload(
        versioned(made),
        example("soften"),
        engine_object_info(),
        {"input": str(uuid4())},
        {},
        seed=1,
    )
    assert payload.prompt["6"]["inputs"]["resize_type.longer_size"] == 128
    assert payload.assets[0].binding == "1.image"


def test_required_inputs_that_are_missing_are_warned_of() -> None:
    document = {
        "1": {"class_type": "ComfyfleetFail", "inputs": {}},
        "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}},
    }
    made = drafted(document=document, output_node_id=None, object_info=engine_object_info())
    (warning,) = made.warnings
    assert "node 1 ComfyfleetFail" in warning
    for name in ("fail", "message", "after_ms"):
        assert name in warning
    complete = {"2": {"class_type": "PreviewAny", "inputs": {"source": "hello"}}}
    assert (
        drafted(document=complete, output_node_id=None, object_info=engine_object_info()).warnings
        == ()
    )


def test_a_placeholder_in_braces_survives_the_choosing_of_words() -> None:
    document = a_workflow(a_node(1, "CLIPTextEncode", "{{subject}} in {oil|chalk} // a note"))
    subject = Property("subject", "text", placeholder="{{subject}}")
    made = drafted(subject, document=document, output_node_id=None)
    payload = build_payload(
        versioned(made),
        document,
        OBJECT_INFO,
        {"subject": "{a|b} // cat"},
        {},
        seed=1,
        chance=RandomSource(),
    )
    assert payload.prompt["1"]["inputs"]["text"] == "{a|b} // cat in oil "


def test_a_node_inside_a_subgraph_is_bound_by_its_id_in_the_prompt() -> None:
    made = drafted(
        Property("x", "text", binding="4.filename_prefix"),
        document=example("negative"),
        output_node_id=None,
        object_info=engine_object_info(),
    )
    assert "ImageInvert" in made.node_types
    with pytest.raises(InvalidInput, match='no node has the id, title or class "3"'):
        # The subgraph itself is no node of the prompt.
        drafted(
            Property("x", "number", binding="3.scale_by"),
            document=example("negative"),
            output_node_id=None,
            object_info=engine_object_info(),
        )


def test_types_that_nobody_knows_yet_are_kept_with_the_models_they_name() -> None:
    document = a_workflow(a_node(1, "NewLoader", "new.safetensors"), a_node(2, "SaveImage", "x"))
    made = drafted(document=document, output_node_id=None)
    assert made.node_types == ("NewLoader", "SaveImage")
    assert made.models == (ModelUse("", "new.safetensors"),)
    with pytest.raises(UnknownNodeTypes, match="NewLoader"):
        build_payload(versioned(made), document, OBJECT_INFO, {}, {}, seed=1)


def test_a_placeholder_in_a_node_that_nobody_knows_yet_is_believed() -> None:
    document = a_workflow(a_node(1, "NewLoader", "WHO", "other"), a_node(2, "SaveImage", "x"))
    who = Property("who", "text", placeholder="WHO")
    assert drafted(who, document=document, output_node_id=None).properties[0].required
    with pytest.raises(InvalidInput, match="doesn't contain"):
        drafted(Property("who", "text", placeholder="NOT"), document=document, output_node_id=None)


def test_a_workflow_inside_of_something_is_found() -> None:
    wrapped = {"extra_data": {"extra_pnginfo": {"workflow": example("negative")}}}
    made = drafted(document=wrapped, output_node_id=None, object_info=engine_object_info())
    assert json.loads(made.document) == example("negative")


def test_the_object_info_that_knows_the_most_is_taken() -> None:
    video: dict[str, Any] = {"LoadVideo": {}, "GetVideoComponents": {}}
    assert best_object_info(example("video"), [OBJECT_INFO, video]) is video
    assert best_object_info(example("video"), []) is None


def test_a_binding_names_a_node_by_its_title_as_set_does() -> None:
    def bound(binding: str) -> str | None:
        made = drafted(
            Property("size", "integer", binding=binding),
            document=example("negative"),
            output_node_id=None,
            object_info=engine_object_info(),
        )
        return made.properties[0].binding

    assert bound("Canvas.width") == bound("2.width") == "2.width"
    with pytest.raises(InvalidInput, match=r"Canvass.*Canvas"):
        bound("Canvass.width")
