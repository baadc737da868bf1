"""The files of a job on its backend."""

from typing import Any
from uuid import UUID, uuid4

import pytest
from tests.support.backends.prompts import node

from comfyfleet.comfy import NodeProblem
from comfyfleet.errors import InvalidInput, PromptRefused
from comfyfleet.worker.job_files import (
    BackendFileInputs,
    find_file_inputs,
    foreign_files,
    input_name,
    is_unlisted,
    job_folder,
    with_output_folder,
)

PNG = b"\x89PNG\r\n\x1a\n" + bytes(30)
FOLDER = "comfyfleet/f"
OBJECT_INFO: dict[str, Any] = {
    "LoadImage": {"input": {"required": {"image": [["logo.png"], {"image_upload": True}]}}},
    "LoadVideo": {"input": {"required": {"file": ["COMBO", {"video_upload": True}]}}},
    "LoadLatent": {"input": {"required": {"latent": [["a.latent"]]}}},
    "Checkpoint": {"input": {"required": {"ckpt_name": [["sub/a.safetensors"], {}]}}},
    "Text": {"input": {"required": {"text": ["STRING", {}]}}},
    "Save": {"input": {"required": {"filename_prefix": ["STRING", {"default": "usual"}]}}},
    "StringConcatenate": {"input": {"required": {}}},
    "StringReplace": {"input": {"required": {}}},
}
KNOWN = find_file_inputs(OBJECT_INFO)


def test_a_folder_cannot_be_guessed_and_is_the_same_again() -> None:
    token = uuid4()
    assert job_folder(token) == job_folder(UUID(str(token))) != job_folder(uuid4())
    assert token.hex[:8] not in job_folder(token)
    assert len(job_folder(token).rpartition("/")[2]) == 32


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (PNG, "in_put.png"),
        (b"\xff\xd8\xff\xe0", "in_put.jpg"),
        (b"\0\0\0\x18ftypisom", "in_put.mp4"),
        (b"#EXTM3U\n../output/a.mp4", "in_put.dat"),
        (b"ffconcat version 1.0\nfile a.mp4", "in_put.dat"),
        (b"", "in_put.dat"),
    ],
)
def test_the_ending_of_an_input_is_that_of_its_bytes(first: bytes, expected: str) -> None:
    assert input_name("in put", first) == expected


@pytest.mark.parametrize(
    ("class_type", "name", "value"),
    [
        ("LoadImage", "image", "cat_00001_.png [output]"),
        ("LoadImage", "image", "logo.png [temp]"),
        ("LoadImage", "image", "comfyfleet/abc/input.png"),
        ("LoadImage", "image", "../output/cat.png"),
        ("LoadVideo", "file", "clip.mp4"),
        ("LoadLatent", "latent", "a.latent [output]"),
    ],
)
def test_a_file_of_somebody_else_is_found(class_type: str, name: str, value: str) -> None:
    wrapped = {"__value__": {"__value__": value}}
    for given in (value, wrapped):
        prompt = {"7": node(class_type, **{name: given})}
        found = list(foreign_files(prompt, KNOWN, frozenset({"mine.png"})))
        assert found == [("7", name, value)]


@pytest.mark.parametrize(
    "value",
    ["logo.png", ["3", 0], {"__value__": ["3", 0]}, {"__value__": "logo.png"}, 5, ["a", "b"]],
)
def test_of_a_stranger_only_files_of_the_job_itself_are_taken(value: Any) -> None:
    own = frozenset({"mine.png"})
    prompt = {"7": node("LoadImage", image=value), "8": node("LoadImage", image="mine.png")}
    assert [each[0] for each in foreign_files(prompt, KNOWN, own, is_strangers=True)] == ["7"]


@pytest.mark.parametrize(
    ("class_type", "name", "value"),
    [
        ("LoadImage", "image", "comfyfleet/mine/input.png"),
        ("LoadImage", "image", "logo.png"),
        ("LoadImage", "image", ["3", 0]),
        ("Checkpoint", "ckpt_name", "sub/a.safetensors"),
        ("Text", "text", "a cat [output]"),
        ("Unknown", "image", "logo.png"),
    ],
)
def test_own_files_those_of_the_operator_models_and_texts_are_none_of_that(
    class_type: str, name: str, value: Any
) -> None:
    prompt = {"7": node(class_type, **{name: value}), "odd": 5}
    assert not list(foreign_files(prompt, KNOWN, frozenset({"comfyfleet/mine/input.png"})))


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("cat", "comfyfleet/f/cat"),
        ("video/cat_%width%", "comfyfleet/f/video/cat_%width%"),
        ("../../etc/cat", "comfyfleet/f/etc/cat"),
        ("/abs\\cat", "comfyfleet/f/abs/cat"),
        ("..", "comfyfleet/f/ComfyUI"),
        ("", "comfyfleet/f/ComfyUI"),
    ],
)
def test_outputs_are_saved_into_the_folder_of_the_job(prefix: str, expected: str) -> None:
    prompt = {"9": node("Save", images=["1", 0], filename_prefix=prefix)}
    made = with_output_folder(prompt, FOLDER, KNOWN)
    assert made["9"]["inputs"] == {"images": ["1", 0], "filename_prefix": expected}
    assert prompt["9"]["inputs"]["filename_prefix"] == prefix


def test_a_prefix_that_is_left_out_or_comes_from_a_node_is_placed_too() -> None:
    prompt = {"8": node("Save"), "9": node("Save", filename_prefix=["1", 0])}
    made = with_output_folder(prompt, FOLDER, KNOWN)
    assert made["8"]["inputs"]["filename_prefix"] == "comfyfleet/f/usual"
    joined = made[made["9"]["inputs"]["filename_prefix"][0]]["inputs"]
    assert (joined["string_a"], joined["delimiter"]) == ("comfyfleet/f/", "")
    # What another node makes must not lead out of the folder, either.
    inside = made[joined["string_b"][0]]
    assert inside["class_type"] == "StringReplace"
    assert inside["inputs"] == {"string": ["1", 0], "find": "..", "replace": "_"}
    assert with_output_folder(prompt, FOLDER, BackendFileInputs())["9"] == prompt["9"]


def test_no_node_of_a_prompt_takes_the_place_of_what_confines_a_prefix() -> None:
    prompt = {
        "9": node("Save", filename_prefix=["1", 0]),
        "9.filename_prefix": node("Text", text="elsewhere/cat", filename_prefix="x"),
        "9.filename_prefix_.inside": node("Text", text="elsewhere/cat", filename_prefix="x"),
    }
    made = with_output_folder(prompt, FOLDER, KNOWN)
    joined = made[made["9"]["inputs"]["filename_prefix"][0]]
    assert joined["class_type"] == "StringConcatenate"
    assert made[joined["inputs"]["string_b"][0]]["class_type"] == "StringReplace"
    assert all(made[each]["class_type"] == prompt[each]["class_type"] for each in prompt)


@pytest.mark.parametrize("prefix", [["1", 0], {"x": 1}, 5])
def test_a_prefix_of_a_stranger_that_can_not_be_confined_is_refused(prefix: Any) -> None:
    prompt = {"9": node("Save", filename_prefix=prefix)}
    with pytest.raises(InvalidInput, match="must be a string"):
        with_output_folder(prompt, FOLDER, BackendFileInputs(), is_strangers=True)


def test_a_loader_that_lists_no_subfolders_is_told_from_other_refusals() -> None:
    problem = NodeProblem("1", "", "Load", "value_not_in_list", "no", received="comfyfleet/f/a.png")
    refused = PromptRefused("no", problems=(problem,))
    assert is_unlisted(refused, ["comfyfleet/f/a.png"])
    assert not is_unlisted(refused, ["other"])
    assert not is_unlisted(PromptRefused("no"), ["comfyfleet/f/a.png"])
