"""Names of the files that came out."""

from itertools import islice
from pathlib import Path

import pytest

from comfyfleet.cli.run_progress import NodePlan
from comfyfleet.cli.run_session import (
    check_folder,
    numbered_names,
    output_names,
    readable_name,
    reserve_name,
)
from comfyfleet.comfy import OutputFile
from comfyfleet.errors import InvalidInput


@pytest.mark.parametrize(
    ("on_server", "here"),
    [
        ("softened_00001_.png", "softened.png"),
        ("clip_00012_.mp4", "clip.mp4"),
        ("clip_00003-audio.mp4", "clip-audio.mp4"),
        ("year_2024.png", "year_2024.png"),
        ("ComfyUI_temp_abcde_00001_.png", "Before-after.png"),
        ("0123456789abcdef" * 4 + ".png", "Before-after.png"),
        ("no suffix", "no suffix"),
        (".hidden", "hidden"),
        ("a.tar.gz", "a.tar.gz"),
    ],
)
def test_names_lose_the_servers_counter(on_server: str, here: str) -> None:
    assert readable_name(on_server, node_name="Before/after") == here


@pytest.mark.parametrize(
    "hostile",
    ["../../etc/passwd", "..\\..\\boot.ini", "/etc/passwd", "..", "", "a\nb.png", "x" * 500, "..."],
)
def test_no_name_leads_out_of_the_folder(hostile: str, tmp_path: Path) -> None:
    path = reserve_name(tmp_path, readable_name(hostile))
    assert path.parent == tmp_path
    assert path.is_file()
    assert path.name.isprintable()


def test_names_are_numbered_from_the_second_on() -> None:
    assert list(islice(numbered_names("a.b.png"), 3)) == ["a.b.png", "a.b-2.png", "a.b-3.png"]


def test_a_taken_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_text("mine")
    assert reserve_name(tmp_path / ".", "cat.png").name == "cat-2.png"
    assert reserve_name(tmp_path, "cat.png").name == "cat-3.png"
    assert (tmp_path / "cat.png").read_text() == "mine"


def test_the_folder_is_made(tmp_path: Path) -> None:
    assert reserve_name(tmp_path / "a" / "b", "cat.png").exists()


def test_a_file_in_place_of_the_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("")
    with pytest.raises(InvalidInput, match="output"):
        reserve_name(tmp_path / "output", "cat.png")


def test_where_results_can_go_is_known_without_making_it(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


def test_a_file_on_the_way_to_the_folder_is_told_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(InvalidInput, match="isn't a folder"):
        check_folder(tmp_path / "a" / "b")


def test_previews_of_equal_titles_are_told_apart_by_their_nodes() -> None:
    plan = NodePlan({"7": "Preview Mask", "12:3": "Preview Mask", "9": "Save Image"})
    files = [OutputFile(node, "images", "a.png") for node in ("12:3", "7", "7", "9", "unknown")]
    assert output_names(files, plan) == {
        "12:3": "Preview Mask node 12:3",
        "7": "Preview Mask node 7",
        "9": "Save Image",
    }
    preview = readable_name("ComfyUI_temp_abcde_00001_.png", node_name="Preview Mask node 12:3")
    assert preview == "Preview Mask node 12_3.png"
