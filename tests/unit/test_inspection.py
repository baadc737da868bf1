"""What a file takes, makes and needs is told, and with a server what of that is missing there."""

import json
from typing import Any

import pytest
from tests.unit.small_server import OBJECT_INFO, node, node_class, socket, text_to_image

from comfyfleet.errors import InvalidInput, InvalidWorkflow
from comfyfleet.workflow import convert_with_report
from comfyfleet.workflow.edit import Assignment, prompt_flow, set_shorthands, set_values
from comfyfleet.workflow.embedded import Opened
from comfyfleet.workflow.inspect import Inspection, inspect
from comfyfleet.workflow.inspect.results import (
    ChainSummary,
    GroupSummary,
    InspectedInput,
    NamedFile,
)

SAMPLER_VALUES = [5, "fixed", 20, 8.0, "euler", "normal", 1.0]
OPTIONS = {"image_upload": True}


def saved(
    node_id: int, node_type: str, values: list[Any] | None = None, **fields: Any
) -> dict[str, Any]:
    return {"id": node_id, "type": node_type, "mode": 0, "widgets_values": values or [], **fields}


def named(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "type": "X", "widget": {"name": name}, "link": None} for name in names]


def workflow(*nodes: dict[str, Any], links: Any = (), **fields: Any) -> dict[str, Any]:
    return {"nodes": list(nodes), "links": list(links), "version": 0.4, **fields}


def look(document: dict[str, Any], object_info: Any = OBJECT_INFO) -> Inspection:
    opened = (
        Opened("json", document, None) if "nodes" in document else Opened("json", None, document)
    )
    return inspect(opened, object_info)


def values(found: Inspection) -> dict[str | None, Any]:
    return {taken.address: taken.value for taken in found.takes}


def taken(found: Inspection, address: str) -> InspectedInput:
    return next(each for each in found.takes if each.address == address)


def files(found: Inspection) -> dict[str, NamedFile]:
    return {file.name: file for file in found.files}


def test_a_prompt_takes_every_value_that_no_link_decides() -> None:
    found = look(text_to_image())
    assert found.form == "prompt"
    assert found.nodes == 7
    assert values(found) == {
        "4.ckpt_name": "v1-5.safetensors",
        "5.width": 512,
        "5.height": 512,
        "5.batch_size": 1,
        "6.text": "a cat",
        "7.text": "a dog",
        "3.seed": 5,
        "3.steps": 20,
        "3.cfg": 8.0,
        "3.sampler_name": "euler",
        "3.scheduler": "normal",
        "3.denoise": 1.0,
        "9.filename_prefix": "ComfyUI",
    }


def test_an_input_is_told_with_its_type_range_and_default() -> None:
    steps = taken(look(text_to_image()), "3.steps")
    assert (steps.type, steps.min, steps.max, steps.default) == ("INT", 1, 10_000, 20)
    assert steps.node.title == "Main sampler"
    scheduler = taken(look(text_to_image()), "3.scheduler")
    assert (scheduler.type, scheduler.choices) == ("COMBO", ("normal", "karras", "simple"))


@pytest.mark.parametrize("object_info", [OBJECT_INFO, None], ids=["server", "no server"])
def test_what_matters_has_a_role(object_info: Any) -> None:
    prompt = {**text_to_image(), "10": node("LoadImage", image="cat.png")}
    roles = {each.address: each.role for each in look(prompt, object_info).takes if each.role}
    assert roles == {
        "4.ckpt_name": "model",
        "5.width": "size",
        "5.height": "size",
        "6.text": "text",
        "7.text": "text",
        "3.seed": "seed",
        "3.steps": "steps",
        "10.image": "file",
    }


def test_inputs_are_told_with_the_shorthands_that_set_them() -> None:
    found = look(text_to_image())
    told = {each.address: each.shorthands for each in found.takes if each.role}
    assert told == {
        "4.ckpt_name": ("model",),
        "5.width": ("size", "width"),
        "5.height": ("size", "height"),
        "6.text": ("prompt",),
        "7.text": ("negative",),
        "3.seed": ("seed",),
        "3.steps": ("steps",),
    }


def test_a_primitive_matters_by_its_title() -> None:
    info = {"PrimitiveInt": node_class({"value": ["INT", {}]}, ["INT"])}
    found = look({"1": node("PrimitiveInt", "Seed", value=3)}, info)
    assert taken(found, "1.value").role == "seed"


def test_inputs_that_a_choice_brings_are_told_too() -> None:
    prompt = {"1": node("ResizeImage", **{"resize_type": "scale width", "resize_type.width": 640})}
    found = look(prompt)
    assert taken(found, "1.resize_type.width").max == 16_384
    assert taken(found, "1.resize_type").choices is not None


def test_a_workflow_is_seen_as_the_prompt_that_it_becomes() -> None:
    found = look(workflow(saved(3, "KSampler", SAMPLER_VALUES, title="Main sampler")))
    assert values(found)["3.seed"] == 5
    assert values(found)["3.steps"] == 20
    assert "3.control_after_generate" not in values(found)


def subgraph_workflow(**instance: Any) -> dict[str, Any]:
    """A sampler inside a subgraph that shows its steps outside."""
    inner = saved(7, "KSampler", SAMPLER_VALUES, inputs=named("steps"))
    inner["inputs"][0]["link"] = 1
    link = {"id": 1, "origin_id": -10, "origin_slot": 0, "target_id": 7, "target_slot": 0}
    definition = {
        "id": "uuid",
        "name": "Refine",
        "nodes": [inner],
        "links": [{**link, "type": "INT"}],
        "inputs": [{"name": "rounds", "type": "INT", "linkIds": [1]}],
        "outputs": [],
    }
    host = saved(2, "uuid", [33], title="Polish", inputs=named("rounds"), **instance)
    return workflow(host, definitions={"subgraphs": [definition]}, last_node_id=7)


@pytest.mark.parametrize("object_info", [OBJECT_INFO, None], ids=["server", "no server"])
def test_what_a_subgraph_shows_has_its_name_and_value_there(object_info: Any) -> None:
    steps = taken(look(subgraph_workflow(), object_info), "2:7.steps")
    assert steps.exposed_as == "Polish.rounds"
    assert steps.value == 33
    assert steps.node.path == ("Polish",)


def labelled_workflow(inner: int = 1) -> dict[str, Any]:
    """A subgraph whose author called the input "duration" that feeds the steps of its samplers."""
    document = subgraph_workflow()
    (definition,) = document["definitions"]["subgraphs"]
    (sampler,), (link,) = definition["nodes"], definition["links"]
    definition["inputs"][0]["label"] = "duration"
    for number in range(2, inner + 1):
        copy = json.loads(json.dumps(sampler))
        copy["id"], copy["inputs"][0]["link"] = 7 + number, number
        definition["nodes"].append(copy)
        definition["links"].append({**link, "id": number, "target_id": 7 + number})
        definition["inputs"][0]["linkIds"].append(number)
    return document


def test_what_a_subgraph_shows_is_told_as_its_author_labelled_it() -> None:
    steps = taken(look(labelled_workflow()), "2:7.steps")
    assert steps.exposed_as == "Polish.duration"


@pytest.mark.parametrize(
    "target", ["Polish.duration", "Polish.rounds", "2.duration", "2.rounds", "2:7.steps"]
)
def test_what_a_subgraph_shows_is_set_by_its_label(target: str) -> None:
    made = convert_with_report(labelled_workflow(), OBJECT_INFO)
    edit = set_values(made.prompt, OBJECT_INFO, [Assignment(target, "3")], exposed=made.exposed)
    assert edit.prompt["2:7"]["inputs"]["steps"] == 3


def test_all_inputs_that_a_subgraph_feeds_by_one_label_are_set() -> None:
    made = convert_with_report(labelled_workflow(inner=3), OBJECT_INFO)
    assignments = [Assignment("Polish.duration", 4)]
    edit = set_values(made.prompt, OBJECT_INFO, assignments, exposed=made.exposed)
    assert [entry["inputs"]["steps"] for entry in edit.prompt.values()] == [4, 4, 4]


def test_a_shorthand_means_the_label_where_the_graph_tells_nothing() -> None:
    made = convert_with_report(labelled_workflow(), OBJECT_INFO)
    edit = set_shorthands(made.prompt, OBJECT_INFO, {"duration": "5"}, exposed=made.exposed)
    assert edit.prompt["2:7"]["inputs"]["steps"] == 5
    assert edit.warnings == ()


def test_a_label_that_is_not_there_is_told_with_those_that_are() -> None:
    made = convert_with_report(labelled_workflow(), OBJECT_INFO)
    with pytest.raises(InvalidInput, match='exposes no input "speed"; it exposes: "duration"'):
        set_values(made.prompt, OBJECT_INFO, [Assignment("Polish.speed", 1)], exposed=made.exposed)


def test_the_links_of_a_prompt_are_walked_once_for_all_shorthands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each shorthand that looked for the samplers by itself made minutes of a hundred thousand links."""
    links = {f"in_{number}": ["8", 0] for number in range(3000)}
    prompt = text_to_image()
    prompt["9"]["inputs"] |= links
    monkeypatch.setattr(prompt_flow, "STEPS_MAX", 2 * len(links) + 1000)
    told = {each.address: each.shorthands for each in look(prompt).takes if each.role}
    assert told["3.seed"] == ("seed",)
    assert told["6.text"] == ("prompt",)


def test_what_has_a_shorthand_comes_first() -> None:
    found = look(text_to_image())
    ranked = [each.shorthands[0] for each in found.takes if each.shorthands]
    assert ranked[0] == "prompt"
    assert all(each.shorthands for each in found.takes[: len(ranked)])


def test_subgraphs_are_summed_up() -> None:
    (summary,) = look(subgraph_workflow()).subgraphs
    assert (summary.name, summary.nodes, summary.instances) == ("Refine", 1, 1)
    assert summary.inputs == ("rounds",)


def test_what_is_switched_off_is_told_and_takes_nothing() -> None:
    document = workflow(
        {**saved(1, "LoadImage", ["cat.png", "image"]), "mode": 4},
        {**saved(2, "EmptyLatentImage", [512, 512, 1]), "mode": 2, "title": "Canvas"},
    )
    found = look(document)
    off = [(each.node.id, each.node.title, each.how) for each in found.switched_off]
    assert off == [("1", "Load Image", "bypassed"), ("2", "Canvas", "muted")]
    assert found.takes == ()
    assert found.nodes == 0
    assert not files(found)["cat.png"].active


def test_a_subgraph_that_is_switched_off_is_told_by_its_name() -> None:
    document = subgraph_workflow()
    document["nodes"][0]["mode"] = 4
    (off,) = look(document).switched_off
    assert (off.node.class_type, off.node.title) == ("Refine", "Polish")


def test_an_instance_that_can_make_nothing_is_a_dead_shell() -> None:
    document = subgraph_workflow()
    document["definitions"]["subgraphs"][0]["nodes"][0]["mode"] = 4
    (shell,) = look(document).dead_shells
    assert (shell.id, shell.class_type, shell.title) == ("2", "Refine", "Polish")


def test_groups_are_told_with_what_lies_in_them() -> None:
    document = workflow(
        {**saved(1, "SaveImage"), "pos": [10, 50], "size": [100, 100]},
        {**saved(2, "SaveImage"), "pos": [900, 50], "size": [100, 100]},
        groups=[{"title": "Out", "bounding": [0, 0, 300, 300]}, {"title": "Broken"}],
    )
    assert look(document).groups == (GroupSummary("Out", 1),)


def chain_workflow() -> dict[str, Any]:
    """A picture that goes through three numbered instances of one subgraph."""
    ends = [
        {"id": 1, "origin_id": -10, "origin_slot": 0, "target_id": 9, "target_slot": 0},
        {"id": 2, "origin_id": 9, "origin_slot": 0, "target_id": -20, "target_slot": 0},
    ]
    port = {"name": "image", "type": "IMAGE"}
    inner = saved(
        9, "ResizeImage", ["scale by", 2.0], inputs=[{**port, "name": "input", "link": 1}]
    )
    definition = {
        "id": "uuid",
        "name": "Extend",
        "nodes": [{**inner, "outputs": [{**port, "links": [2]}]}],
        "links": [{**link, "type": "IMAGE"} for link in ends],
        "inputs": [{**port, "linkIds": [1]}],
        "outputs": [{**port, "linkIds": [2]}],
    }
    instances = [
        saved(
            number, "uuid", title=f"Extend {number}", inputs=[{**port, "link": 10 + number}],
            outputs=[{**port, "links": [11 + number]}],
        )
        for number in (1, 2, 3)
    ]  # fmt: skip
    return workflow(
        saved(8, "LoadImage", ["cat.png"], outputs=[{**port, "links": [11]}]),
        *instances,
        saved(7, "SaveImage", inputs=[{**port, "name": "images", "link": 14}]),
        links=[
            [11, 8, 0, 1, 0, "IMAGE"], [12, 1, 0, 2, 0, "IMAGE"],
            [13, 2, 0, 3, 0, "IMAGE"], [14, 3, 0, 7, 0, "IMAGE"],
        ],
        definitions={"subgraphs": [definition]},
        last_node_id=9,
    )  # fmt: skip


def test_chains_of_numbered_parts_are_told() -> None:
    titles = ("Extend 1", "Extend 2", "Extend 3")
    assert look(chain_workflow()).chains == (ChainSummary("Extend", "instance", titles, ()),)


def test_output_nodes_are_what_it_makes() -> None:
    (made,) = look(text_to_image()).makes
    assert (made.node.id, made.media, made.saved) == ("9", "image", True)
    assert made.file_name_prefix == "ComfyUI"


@pytest.mark.parametrize(
    ("class_name", "kind", "media"),
    [
        ("SaveAnimatedWEBP", "IMAGE", "animation"),
        ("VHS_VideoCombine", "IMAGE", "video"),
        ("SaveWEBM", "IMAGE", "video"),
        ("SaveGLB", "MESH", "3d"),
        ("PreviewAny", "*", "text"),
        ("Keep", "AUDIO", "audio"),
        ("Keep", "STRANGE", "unknown"),
    ],
)
def test_media_are_known_by_class_and_inputs(class_name: str, kind: str, media: str) -> None:
    info = {class_name: node_class({"x": socket(kind)}, is_output=True)}
    (made,) = look({"1": node(class_name)}, info).makes
    assert made.media == media


def test_without_a_server_what_feeds_nothing_is_an_output() -> None:
    found = look(text_to_image(), None)
    assert [(made.node.id, made.media) for made in found.makes] == [("9", "image")]


def test_models_are_known_by_their_names_and_told_with_their_source() -> None:
    model = {"name": "base.safetensors", "url": "https://example.com/b", "directory": "checkpoints"}
    loader = saved(4, "CheckpointLoaderSimple", ["sdxl/base.safetensors"])
    found = look(workflow({**loader, "properties": {"models": [model, 5, {"name": None}]}}))
    (file,) = found.files
    assert (file.name, file.addresses) == ("sdxl/base.safetensors", ("4.ckpt_name",))
    assert (file.directory, file.url) == ("checkpoints", "https://example.com/b")
    assert file.present is True


def test_a_described_model_that_no_value_names_is_told_too() -> None:
    found = look(workflow(models=[{"name": "extra.safetensors", "directory": "loras"}]))
    assert found.files == (NamedFile("extra.safetensors", "model", directory="loras"),)


def test_one_file_in_two_places_is_told_once() -> None:
    prompt = {"1": node("LoadImage", image="cat.png"), "2": node("LoadImage", image="cat.png")}
    (file,) = look(prompt).files
    assert file.addresses == ("1.image", "2.image")


def test_embeddings_in_texts_are_files() -> None:
    text = "a cat, (embedding:easynegative:1.2), embedding:faces/good.pt"
    found = files(look({"1": node("CLIPTextEncode", text=text)}))
    assert {name: file.kind for name, file in found.items()} == {
        "easynegative": "embedding",
        "faces/good.pt": "embedding",
    }


def test_models_inside_values_are_found() -> None:
    prompt = {"1": node("Loras", lora_1={"on": True, "lora": "style.safetensors"})}
    assert files(look(prompt))["style.safetensors"].addresses == ("1.lora_1",)


def test_node_types_are_counted_and_their_packs_named() -> None:
    document = workflow(
        saved(1, "SaveImage", properties={"cnr_id": "comfy-core", "ver": "0.3.1"}),
        saved(2, "SaveImage", properties={"cnr_id": "comfy-core", "ver": "0.3.2"}),
        saved(3, "Blur", properties={"aux_id": "someone/blur"}),
        saved(4, "Note"),
    )
    found = look(document)
    types = [(each.class_type, each.count, each.pack, each.known) for each in found.node_types]
    assert types == [
        ("SaveImage", 2, "comfy-core", True),
        ("Blur", 1, "someone/blur", False),
    ]
    assert [(pack.name, pack.versions) for pack in found.packs] == [
        ("comfy-core", ("0.3.1", "0.3.2")),
        ("someone/blur", ()),
    ]


@pytest.mark.parametrize(
    ("module", "pack"),
    [
        ("nodes", "comfy-core"),
        ("comfy_extras.nodes_mask", "comfy-core"),
        ("custom_nodes.ComfyUI-KJNodes", "ComfyUI-KJNodes"),
        ("", None),
    ],
)
def test_a_pack_that_the_file_does_not_name_the_server_may_know(
    module: str, pack: str | None
) -> None:
    info = {"Thing": {**node_class({}), "python_module": module}}
    assert look({"1": node("Thing")}, info).node_types[0].pack == pack


def test_node_types_that_the_server_lacks_are_missing() -> None:
    document = workflow(
        saved(1, "Blur", title="Soft", properties={"cnr_id": "blur-pack"}),
        saved(2, "Blur"),
        {**saved(3, "Gone"), "mode": 2},
    )
    missing = look(document).missing
    assert missing
    (blur,) = missing.node_types
    assert (blur.class_type, blur.pack) == ("Blur", "blur-pack")
    assert [(ref.id, ref.title) for ref in blur.nodes] == [("1", "Soft"), ("2", "Blur")]


def test_a_value_that_the_server_lacks_is_missing_with_the_closest_ones() -> None:
    prompt = {"4": node("CheckpointLoaderSimple", ckpt_name="base.safetensors")}
    missing = look(prompt).missing
    assert missing is not None
    (value,) = missing.values
    assert (value.address, value.closest[0]) == ("4.ckpt_name", "sdxl/base.safetensors")
    assert value.problem == '"base.safetensors" is not among the choices'


def test_an_input_file_that_the_server_lacks_can_be_uploaded() -> None:
    missing = look({"1": node("LoadImage", image="dog.png")}).missing
    assert missing is not None
    assert missing.files == ("dog.png",)
    assert missing.values == ()


def test_an_input_that_the_server_has_no_more_is_missing() -> None:
    document = workflow(saved(2, "EmptyLatentImage", [512, 512, 1], inputs=named("width", "tiles")))
    missing = look(document).missing
    assert missing is not None
    assert [(lost.node.id, lost.input) for lost in missing.inputs] == [("2", "tiles")]


def test_nothing_is_missing_where_all_is_there() -> None:
    missing = look(text_to_image()).missing
    assert missing is not None
    assert not missing
    assert look(text_to_image(), None).missing is None


def test_without_a_server_a_file_that_names_its_values_is_told() -> None:
    sampler = saved(
        3, "KSampler", SAMPLER_VALUES,
        inputs=named("seed", "steps", "cfg", "sampler_name", "scheduler", "denoise"),
    )  # fmt: skip
    loader = saved(1, "LoadImage", ["cat.png", "image"], inputs=named("image"))
    assert values(look(workflow(sampler, loader), None)) == {
        "3.seed": 5,
        "3.steps": 20,
        "3.cfg": 8.0,
        "3.sampler_name": "euler",
        "3.scheduler": "normal",
        "3.denoise": 1.0,
        "1.image": "cat.png",
    }


def test_without_a_server_an_old_file_still_shows_its_values() -> None:
    document = workflow(
        saved(3, "KSampler", SAMPLER_VALUES),
        saved(6, "CLIPTextEncode", ["a cat on a mat"]),
        saved(4, "CheckpointLoaderSimple", ["base.safetensors"]),
    )
    found = look(document, None)
    assert [(each.node.id, each.value, each.role) for each in found.takes if each.role] == [
        ("3", 5, "seed"),
        ("6", "a cat on a mat", "text"),
        ("4", "base.safetensors", "model"),
    ]
    assert all(each.address is None for each in found.takes)
    assert "base.safetensors" in files(found)


def test_without_a_server_a_primitive_tells_the_value_that_it_sets() -> None:
    canvas = saved(2, "EmptyLatentImage", [1, 2, 3], inputs=named("width", "height", "batch_size"))
    canvas["inputs"][0]["link"] = 1
    primitive = saved(1, "PrimitiveNode", [640, "fixed"])
    document = workflow(primitive, canvas, links=[[1, 1, 0, 2, 0, "INT"]])
    assert values(look(document, None))["2.width"] == 640


def test_without_a_server_the_prompt_beside_the_workflow_names_the_values() -> None:
    opened = Opened(
        "png", workflow(saved(5, "EmptyLatentImage", [512, 768, 1])), text_to_image(), ("A note.",)
    )
    found = inspect(opened)
    assert found.form == "workflow"
    assert values(found) == {"5.width": 512, "5.height": 512, "5.batch_size": 1}
    assert found.notes == ("A note.",)


def test_without_a_server_a_group_node_shows_what_it_holds() -> None:
    inner = [saved(0, "SaveImage", ["x"]), saved(1, "Note"), saved(2, "VAELoader", ["v.pt"]), 5]
    document = workflow(
        saved(7, "workflow>Mine"), extra={"groupNodes": {"Mine": {"nodes": inner, "links": []}}}
    )
    found = look(document, None)
    assert [each.class_type for each in found.node_types] == ["SaveImage", "VAELoader"]
    assert found.takes[0].node.path == ("workflow>Mine",)
    assert "v.pt" in files(found)


def test_pictures_inside_values_are_no_files_that_it_needs() -> None:
    shown = {"params": {"filename": "last.png"}}
    assert look({"1": node("VHS_VideoCombine", videopreview=shown)}, None).files == ()


def test_what_cannot_be_converted_is_inspected_as_far_as_it_goes() -> None:
    loop = [
        {**saved(1, "VAEDecode", inputs=[{"name": "samples", "type": "X", "link": 1}]), "mode": 4},
        saved(2, "SaveImage", ["x"], inputs=[{"name": "images", "type": "IMAGE", "link": 2}]),
    ]
    found = look(workflow(*loop, links=[[1, 9, 0, 1, 0, "X"], [2, 9, 0, 2, 0, "IMAGE"]]))
    assert len(found.notes) == 1
    assert found.notes[0].startswith("The workflow can't be converted: ")
    assert [made.node.id for made in found.makes] == ["2"]


def test_a_document_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(InvalidWorkflow):
        look(workflow({"id": 1, "type": 5}))


def test_entries_of_a_prompt_that_are_no_nodes_are_passed_over() -> None:
    prompt: dict[str, Any] = {**text_to_image(), "note": "mine", "x": {"class_type": "SaveImage"}}
    assert look(prompt).nodes == 8


def test_the_input_is_never_modified() -> None:
    document = subgraph_workflow()
    before = json.dumps(document)
    look(document)
    assert json.dumps(document) == before
