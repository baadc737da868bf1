import json
import os
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from tests.unit.engine.node_runs import NOON, RecordingContext, folders_in

from comfyfleet.engine.node import split_annotation
from comfyfleet.engine.saved_files import (
    content_kind,
    files_of,
    fill_tokens,
    missing_file,
    next_counter,
    next_slot,
    save_images,
    save_kept_preview,
    save_preview,
)
from comfyfleet.errors import InvalidInput, NodeFailed

PICTURES = np.zeros((2, 3, 5, 3), np.float32)


@pytest.fixture
def context(tmp_path: Path) -> RecordingContext:
    return RecordingContext(folders_in(tmp_path), {"1": {}}, {"workflow": {"name": "ü"}})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], 1),
        (["shot_00003_.png", "shot_00012_.mp4"], 13),
        (["shot_123456_.png"], 123457),
        (["shot_7.png"], 8),
        (["shot_2_00009_.png"], 3),
        (["shot_final.png"], 1),
        (["shotgun_00004_.png", "Shot_00005_.png", "shot", "shot.png"], 1),
    ],
)
def test_the_counter_goes_on_after_the_highest_number(names: list[str], expected: int) -> None:
    assert next_counter(names, "shot", len("shot")) == expected


def test_sizes_and_dates_are_filled_into_a_prefix() -> None:
    prefix = "%year%-%month%-%day%/%hour%%minute%%second%_%width%x%height%_%date%_%batch_num%"
    filled = fill_tokens(prefix, width=5, height=3, now=NOON)
    assert filled == "2026-03-04/120506_5x3_%date%_%batch_num%"


def test_a_prefix_may_name_a_folder(context: RecordingContext) -> None:
    (saved, _) = save_images(context, PICTURES, "renders/%width%/shot")
    assert saved == {
        "filename": "shot_00001_.png",
        "subfolder": "renders/5",
        "type": "output",
    }
    assert (context.folders.output / "renders/5/shot_00001_.png").is_file()


def test_the_number_in_the_batch_may_be_part_of_the_name(context: RecordingContext) -> None:
    names = [saved["filename"] for saved in save_images(context, PICTURES, "b%batch_num%")]
    assert names == ["b0_00001_.png", "b1_00002_.png"]


@pytest.mark.parametrize(
    ("prefix", "stem"), [("", "."), ("a/", "a"), ("./x", "x"), ("a/../b", "b")]
)
def test_odd_prefixes_are_named_as_comfyui_names_them(
    context: RecordingContext, prefix: str, stem: str
) -> None:
    assert next_slot(context, prefix).name(".png") == f"{stem}_00001_.png"


@pytest.mark.parametrize("prefix", ["../outside/x", "/somewhere/x", "a/../../x"])
def test_nothing_is_saved_outside_the_folder(context: RecordingContext, prefix: str) -> None:
    with pytest.raises(NodeFailed, match="outside"):
        save_images(context, PICTURES, prefix)


def test_saved_pictures_carry_prompt_and_workflow(context: RecordingContext) -> None:
    save_images(context, PICTURES, "shot")
    with PIL.Image.open(context.folders.output / "shot_00001_.png") as picture:
        assert json.loads(picture.info["prompt"]) == {"1": {}}
        assert json.loads(picture.info["workflow"]) == {"name": "ü"}


def test_a_preview_has_other_letters_each_time_and_no_metadata(context: RecordingContext) -> None:
    first, second = save_preview(context, PICTURES)[0], save_preview(context, PICTURES)[0]
    assert first["type"] == "temp"
    assert first["filename"][:18] != second["filename"][:18]
    with PIL.Image.open(context.folders.temp / first["filename"]) as picture:
        assert not picture.info


def test_a_kept_preview_goes_on_counting_under_its_letters(context: RecordingContext) -> None:
    first, second = save_kept_preview(context, PICTURES), save_kept_preview(context, PICTURES)
    letters = context.memory["letters"]
    assert first[0]["filename"] == f"ComfyUI_temp_{letters}_00001_.png"
    assert second[1]["filename"] == f"ComfyUI_temp_{letters}_00004_.png"


@pytest.mark.parametrize("shape", [(0, 0, 0, 3), (1, 0, 4, 3), (1, 4, 4)])
def test_what_is_no_picture_can_not_be_saved(
    context: RecordingContext, shape: tuple[int, ...]
) -> None:
    with pytest.raises(NodeFailed, match="no images"):
        save_images(context, np.zeros(shape, np.float32), "shot")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.png", ("input", "a.png")),
        ("a.png [input]", ("input", "a.png")),
        ("sub/a.png [output]", ("output", "sub/a.png")),
        ("a.png [temp]", ("temp", "a.png")),
        ("a.png [other]", ("input", "a.png [other]")),
    ],
)
def test_a_name_may_say_its_folder(name: str, expected: tuple[str, str]) -> None:
    assert split_annotation(name) == expected


def test_only_names_inside_the_folder_exist(context: RecordingContext, tmp_path: Path) -> None:
    (tmp_path / "secret.png").touch()
    (context.folders.input / "a.png").touch()
    assert context.folders.holds("a.png")
    assert context.folders.holds("./a.png [input]")
    for name in ("../secret.png", str(tmp_path / "secret.png"), "b.png", "a.png [output]", "a\0"):
        assert not context.folders.holds(name)
    with pytest.raises(InvalidInput, match="outside"):
        context.folders.locate("../secret.png")


def test_a_link_put_into_the_folder_is_followed(context: RecordingContext, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/a.png").touch()
    os.symlink(tmp_path / "elsewhere", context.folders.input / "disk")
    assert context.folders.holds("disk/a.png")


def test_loaders_list_the_files_of_their_kind(context: RecordingContext) -> None:
    for name in ("b.png", "a.webp", "c.mp4", "d.txt", "E.MKV", "f"):
        (context.folders.input / name).touch()
    (context.folders.input / "sub.png").mkdir()
    assert files_of("image")(context.folders) == ["a.webp", "b.png"]
    assert files_of("video")(context.folders) == ["E.MKV", "c.mp4"]
    assert len(files_of()(context.folders)) == 6
    assert content_kind("x.mp3") == "audio"


def test_a_folder_that_is_not_there_holds_no_files(tmp_path: Path) -> None:
    folders = folders_in(tmp_path)
    folders.input.rmdir()
    assert files_of()(folders) == []


def test_a_missing_file_is_told_with_its_name(context: RecordingContext) -> None:
    validate = missing_file("image", "image")
    assert validate(context.folders, {"image": "x.png"}) == "Invalid image file: x.png"
    (context.folders.input / "x.png").touch()
    assert validate(context.folders, {"image": "x.png"}) is None
