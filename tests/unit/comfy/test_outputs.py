import pytest

from comfyfleet.comfy.backend import OutputFile, OutputValue
from comfyfleet.comfy.server import find_outputs
from comfyfleet.errors import UnexpectedAnswer

FILE = {"filename": "a.bin", "subfolder": "s", "type": "temp"}


@pytest.mark.parametrize(
    "key", ["images", "gifs", "videos", "video", "files", "audio", "3d", "of_a_custom_node"]
)
def test_files_are_found_under_any_key(key: str) -> None:
    outputs = find_outputs({"9": {key: [FILE]}})
    assert outputs.files == (OutputFile("9", key, "a.bin", "s", "temp"),)


def test_values_are_found_beside_files_and_flags_are_left_out() -> None:
    shown = {"images": [FILE], "animated": [True], "text": ["one", "two"], "scale": [2]}
    outputs = find_outputs({"9": shown})
    assert len(outputs.files) == 1
    assert outputs.values == (
        OutputValue("9", "text", "one"),
        OutputValue("9", "text", "two"),
        OutputValue("9", "scale", 2),
    )


def test_numbers_booleans_and_json_are_values_too() -> None:
    shown = {"score": [0.25], "is_cat": [True], "boxes": [{"x": 1}, [2, 3]], "none": [None]}
    values = [(each.key, each.value) for each in find_outputs({"9": shown}).values]
    assert values == [("score", 0.25), ("is_cat", True), ("boxes", {"x": 1}), ("boxes", [2, 3])]


def test_a_single_file_and_a_single_text_need_no_list() -> None:
    outputs = find_outputs({"9": {"video": FILE, "text": "one"}})
    assert (len(outputs.files), len(outputs.values)) == (1, 1)


def test_what_a_node_leaves_out_has_its_usual_value() -> None:
    (file,) = find_outputs({"9": {"gifs": [{"filename": "a.gif", "format": "x"}]}}).files
    assert (file.subfolder, file.folder) == ("", "output")


@pytest.mark.parametrize("odd", [{"filename": ""}, {"filename": None}, {"x": 1}, None, 5, [FILE]])
def test_what_names_no_file_is_none(odd: object) -> None:
    assert find_outputs({"9": {"images": [odd]}}).files == ()


def test_files_of_cached_nodes_are_marked_as_reused() -> None:
    outputs = find_outputs({"8": {"images": [FILE]}, "9": {"images": [FILE]}}, ["1", "9"])
    assert [file.reused for file in outputs.files] == [False, True]
    assert outputs.reused == ("1", "9")


@pytest.mark.parametrize("odd", [[], None, {"9": []}, {"9": None}])
def test_outputs_of_another_shape_are_not_believed(odd: object) -> None:
    with pytest.raises(UnexpectedAnswer):
        find_outputs(odd)
