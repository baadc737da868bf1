"""Which local files go to which inputs."""

from pathlib import Path
from typing import Any

import pytest

from comfyfleet.cli.run_session import (
    FileInputs,
    find_inputs,
    is_file_place,
    parse_given_file,
    with_uploaded_names,
)
from comfyfleet.errors import InvalidInput

LOAD = {
    "input": {"required": {"image": [["there.png"], {"image_upload": True}]}},
    "output": ["IMAGE", "MASK"],
}
SAVE = {"input": {"required": {"images": ["IMAGE"]}}, "output": [], "output_node": True}
INFO = {"Load": LOAD, "Save": SAVE}


def prompt(*names: str) -> dict[str, Any]:
    nodes: dict[str, Any] = {}
    for index, name in enumerate(names, 1):
        nodes[str(index)] = {
            "class_type": "Load",
            "inputs": {"image": name},
            "_meta": {"title": f"Photo {index}"},
        }
        nodes[f"{index}0"] = {"class_type": "Save", "inputs": {"images": [str(index), 0]}}
    return nodes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "flow").mkdir()
    for name in ("flow/cat.png", "flow/dog.png", "secret.png"):
        (tmp_path / name).write_bytes(b"picture")
    return tmp_path / "flow"


def found(*names: str, beside: Path | None = None, **more: Any) -> FileInputs:
    return find_inputs(prompt(*names), INFO, beside=beside, **{"media": {}} | more)


def pairs(inputs: FileInputs) -> list[tuple[str, list[str]]]:
    return [
        (upload.path.name, [f"{place.node_id}.{place.input}" for place in upload.places])
        for upload in inputs.uploads
    ]


def test_a_file_that_lies_beside_is_uploaded(folder: Path) -> None:
    assert pairs(found("cat.png", beside=folder)) == [("cat.png", ["1.image"])]
    assert pairs(found("cat.png [input]", beside=folder)) == [("cat.png", ["1.image"])]


def test_a_file_that_two_inputs_name_is_uploaded_once(folder: Path) -> None:
    assert pairs(found("cat.png", "cat.png", beside=folder)) == [
        ("cat.png", ["1.image", "2.image"])
    ]


@pytest.mark.parametrize(
    "name", ["../secret.png", "/etc/passwd", "..\\secret.png", "cat.png [output]", "\0.png"]
)
def test_a_workflow_fetches_no_file_from_elsewhere(folder: Path, name: str) -> None:
    assert found(name, beside=folder).uploads == ()


def test_a_link_out_of_the_folder_is_not_followed(folder: Path) -> None:
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    assert found("link.png", beside=folder).uploads == ()


def test_what_is_nowhere_is_missing(folder: Path) -> None:
    missing = found("gone.png", "there.png", "cat.png", beside=folder).missing
    assert [file.name for file in missing] == ["gone.png"]


def test_what_comes_through_a_pipe_has_no_neighbours(folder: Path) -> None:
    assert found("cat.png").uploads == ()


@pytest.mark.parametrize("name", ["image", "1.image", "Photo 1.image"])
def test_a_given_file_goes_before_the_one_beside(folder: Path, name: str) -> None:
    given = [parse_given_file(f"{name}={folder / 'dog.png'}")]
    assert pairs(found("cat.png", beside=folder, given=given)) == [("dog.png", ["1.image"])]


def test_a_name_that_several_have_is_ambiguous(folder: Path) -> None:
    given = [parse_given_file(f"image={folder / 'dog.png'}")]
    with pytest.raises(InvalidInput, match=r"several inputs have that name.*1\.image, 2\.image"):
        found("cat.png", "dog.png", given=given)


def test_a_name_that_none_has_is_told_with_those_there_are(folder: Path) -> None:
    given = [parse_given_file(f"mask={folder / 'dog.png'}")]
    with pytest.raises(InvalidInput, match=r"no file input has that name.*1\.image"):
        found("cat.png", given=given)


def test_the_one_loader_of_a_kind_needs_no_name(folder: Path) -> None:
    assert pairs(found("x.png", media={"image": folder / "cat.png"})) == [("cat.png", ["1.image"])]


def test_of_several_loaders_one_must_be_named(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="matches several inputs") as caught:
        found("x.png", "y.png", media={"image": folder / "cat.png"})
    assert caught.value.details["hint"] == "Specify one: --input 1.image=FILE"


def test_without_a_loader_there_is_no_use_for_a_file(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="--video: the workflow has no node"):
        found("x.png", media={"video": folder / "cat.png"})


def test_a_file_that_is_not_there_is_told_with_the_closest(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="was not found") as caught:
        found("x.png", media={"image": folder / "cta.png"})
    assert "cat.png" in caught.value.details["hint"]


@pytest.mark.parametrize("text", ["image", "=cat.png", "image="])
def test_what_gives_no_file_is_explained(text: str) -> None:
    with pytest.raises(InvalidInput, match="NAME=FILE"):
        parse_given_file(text)


def test_the_names_on_the_server_are_set(folder: Path) -> None:
    uploads = found("cat.png", "dog.png", beside=folder).uploads
    named = with_uploaded_names(prompt("cat.png", "dog.png"), INFO, [(uploads[0], "cat (1).png")])
    assert named["1"]["inputs"]["image"] == "cat (1).png"
    assert named["2"]["inputs"]["image"] == "dog.png"


def test_inputs_for_files_are_known() -> None:
    assert is_file_place(prompt("a.png"), INFO, "Photo 1.image")
    assert not is_file_place(prompt("a.png"), INFO, "10.images")
