"""`comfyfleet convert`: prompts to stdout, words to stderr, exit codes that scripts can rely on."""

import gzip
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tests.support.server.commands import EXAMPLES, NEGATIVE, OBJECT_INFO, SOFTEN, comfyfleet
from tests.unit.saved_files import chunk, png_with
from tests.unit.small_server import OBJECT_INFO as SMALL_SERVER
from tests.unit.small_server import text_to_image

from comfyfleet import __version__
from comfyfleet.cli.workflow import ShorthandOptions
from comfyfleet.workflow.edit import SHORTHANDS

PROMPT: dict[str, Any] = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
}  # fmt: skip


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(PROMPT))
    return str(path)


def workflow_file(tmp_path: Path, *nodes: dict[str, Any], **fields: Any) -> str:
    path = tmp_path / "flow.json"
    path.write_text(json.dumps({"nodes": nodes, "links": [], "version": 0.4, **fields}))
    return str(path)


def test_the_prompt_is_all_that_goes_to_stdout() -> None:
    result = comfyfleet("convert", NEGATIVE, "--object-info", OBJECT_INFO)
    assert result.code == 0
    assert list(result.json) == ["2", "3:7", "3:8", "4"]
    assert result.lines == ["1 node is left out: muted or bypassed"]


def test_the_prompt_can_go_to_a_file(tmp_path: Path) -> None:
    out = tmp_path / "prompt.json"
    result = comfyfleet("convert", NEGATIVE, "--object-info", OBJECT_INFO, "-o", str(out))
    assert (result.code, result.out) == (0, "")
    assert result.lines[-1] == f"wrote 4 nodes to {out}"
    assert len(json.loads(out.read_text())) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["prompt.json"]


def test_a_failed_conversion_leaves_the_old_file(tmp_path: Path) -> None:
    out = tmp_path / "prompt.json"
    out.write_text("old")
    arguments = ("--object-info", OBJECT_INFO, "--set", "Canvas.width=x", "-o", str(out))
    assert comfyfleet("convert", NEGATIVE, *arguments).code == 1
    assert out.read_text() == "old"


def test_what_a_person_drew_is_not_replaced_by_its_prompt(tmp_path: Path) -> None:
    path, link = tmp_path / "flow.json", tmp_path / "link.json"
    path.write_bytes(Path(NEGATIVE).read_bytes())
    link.symlink_to(path)
    for target in (path, link):
        result = comfyfleet("convert", str(path), "--object-info", OBJECT_INFO, "-o", str(target))
        assert result.code == 1
        assert "is not overwritten: it is the input file" in result.err
        assert "--force" in result.err
    assert path.read_bytes() == Path(NEGATIVE).read_bytes()


@pytest.mark.parametrize(
    "content", [b"notes", b"", Path(SOFTEN).read_bytes(), b'{"some": "settings"}']
)
def test_no_file_is_overwritten_but_a_prompt(tmp_path: Path, content: bytes) -> None:
    out = tmp_path / "out.json"
    out.write_bytes(content)
    arguments = ("convert", NEGATIVE, "--object-info", OBJECT_INFO, "-o", str(out))
    refused = comfyfleet(*arguments)
    assert refused.code == 1
    assert "isn't a prompt" in refused.err
    assert out.read_bytes() == content
    assert comfyfleet(*arguments, "--force").code == 0
    # Now there is a prompt: to convert again is no loss.
    assert comfyfleet(*arguments).code == 0
    assert len(json.loads(out.read_text())) == 4


def test_an_object_info_that_is_not_there_is_told_also_of_a_prompt(prompt_file: str) -> None:
    result = comfyfleet("convert", prompt_file, "--object-info", "/nofile.json")
    assert result.code == 1
    assert "file /nofile.json was not found" in result.err


def test_a_device_is_written_to_and_not_replaced() -> None:
    result = comfyfleet("convert", NEGATIVE, "--object-info", OBJECT_INFO, "-o", os.devnull)
    assert result.code == 0
    assert Path(os.devnull).is_char_device()


def test_stdin_is_a_file_too() -> None:
    stdin = Path(NEGATIVE).read_bytes()
    result = comfyfleet("convert", "-", "--object-info", OBJECT_INFO, stdin=stdin)
    assert len(result.json) == 4


def test_a_packed_object_info_is_read(tmp_path: Path) -> None:
    packed = tmp_path / "object_info.json.gz"
    packed.write_bytes(gzip.compress(Path(OBJECT_INFO).read_bytes()))
    assert comfyfleet("convert", NEGATIVE, "--object-info", str(packed)).code == 0


def test_a_prompt_passes_through_without_a_server(prompt_file: str) -> None:
    result = comfyfleet("convert", prompt_file, environ={"COMFYUI_BASE_URL": "http://127.0.0.1:1"})
    assert result.json == PROMPT
    assert result.err == ""


def test_values_of_a_prompt_can_be_set_without_a_server(prompt_file: str) -> None:
    result = comfyfleet("convert", prompt_file, "--set", "1.width=16")
    assert result.json["1"]["inputs"]["width"] == 16
    assert result.lines[0] == "set 1 EmptyImage: width 8 → 16"
    assert result.lines[1].startswith("warning: 1 EmptyImage: width is not checked")


def test_a_picture_with_both_needs_no_server(tmp_path: Path) -> None:
    path = tmp_path / "cat.png"
    texts = {"prompt": json.dumps(PROMPT), "workflow": Path(NEGATIVE).read_text()}
    path.write_bytes(
        png_with(*(chunk(b"tEXt", f"{key}\0{text}".encode()) for key, text in texts.items()))
    )
    result = comfyfleet("convert", str(path))
    assert result.json == PROMPT
    assert "saved with the workflow" in result.err
    converted = comfyfleet("convert", str(path), "--object-info", OBJECT_INFO)
    assert list(converted.json) == ["2", "3:7", "3:8", "4"]


def test_values_are_set_and_said() -> None:
    result = comfyfleet(
        "convert", NEGATIVE, "--object-info", OBJECT_INFO,
        "--set", "Canvas.width=64", "--set", "3:7.scale_by=-0", "--set", "SaveImage.filename_prefix=a=b",
    )  # fmt: skip
    assert result.code == 1
    assert result.lines[0].startswith('error: 3:7 ImageScaleBy "Shrink": scale_by: ')
    result = comfyfleet(
        "convert", NEGATIVE, "--object-info", OBJECT_INFO,
        "--set", "Canvas.width=64", "--set", "SaveImage.filename_prefix=a=b",
    )  # fmt: skip
    assert result.json["2"]["inputs"]["width"] == 64
    assert result.json["4"]["inputs"]["filename_prefix"] == "a=b"
    assert 'set 2 EmptyImage "Canvas": width 384 → 64' in result.lines


def test_the_usual_values_have_shorthands(tmp_path: Path) -> None:
    info = tmp_path / "object_info.json"
    info.write_text(json.dumps(SMALL_SERVER))
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps(text_to_image()))
    result = comfyfleet(
        "convert", str(prompt), "--object-info", str(info), "--prompt", "a fox", "--negative", "-",
        "--seed", "7", "--steps", "9", "--size", "640x480", "--fps", "25", "--set", "3.steps=11",
    )  # fmt: skip
    assert result.code == 0
    assert result.json["6"]["inputs"]["text"] == "a fox"
    assert result.json["7"]["inputs"]["text"] == "-"
    assert result.json["5"]["inputs"]["width"] == 640
    assert (result.json["3"]["inputs"]["seed"], result.json["3"]["inputs"]["steps"]) == (7, 11)
    assert 'set 3 KSampler "Main sampler": seed 5 → 7' in result.lines
    assert any(line.startswith("warning: fps: not set") for line in result.lines)


def test_every_shorthand_is_an_option() -> None:
    names = [field.name for field in fields(ShorthandOptions)]
    assert names == [shorthand.name for shorthand in SHORTHANDS]


def test_a_warning_about_a_value_ends_when_it_is_set(tmp_path: Path) -> None:
    flow = workflow_file(tmp_path, {"id": 1, "type": "EmptyImage", "widgets_values": [0, 8, 1, 0]})
    refused = comfyfleet("convert", flow, "--object-info", OBJECT_INFO)
    assert refused.lines == [
        "warning: node 1 EmptyImage › input width: 0 is below the minimum of 1"
    ]
    fixed = comfyfleet("convert", flow, "--object-info", OBJECT_INFO, "--set", "1.width=8")
    assert fixed.lines == ["set 1 EmptyImage: width 0 → 8"]


def test_dates_are_filled_in_and_choices_made(tmp_path: Path) -> None:
    info = json.loads(Path(OBJECT_INFO).read_text())
    info["Say"] = {"input": {"required": {"text": ["STRING", {"dynamicPrompts": True}]}}}
    info_file = tmp_path / "object_info.json"
    info_file.write_text(json.dumps(info))
    flow = workflow_file(
        tmp_path,
        {"id": 1, "type": "SaveImage", "widgets_values": ["%date:yyyy-MM-dd%"]},
        {"id": 2, "type": "Say", "widgets_values": ["{a|b|c|d|e|f}"]},
    )
    arguments = ("convert", flow, "--object-info", str(info_file), "--seed-rng")
    texts = [comfyfleet(*arguments, str(seed)).json["2"]["inputs"]["text"] for seed in range(9)]
    assert len(set(texts)) > 1
    again = comfyfleet(*arguments, "0").json
    assert again["2"]["inputs"]["text"] == texts[0]
    assert again["1"]["inputs"]["filename_prefix"] == "2026-01-02"


def test_nodes_that_the_server_lacks_are_left_out_kept_or_refused(tmp_path: Path) -> None:
    node = {"id": 1, "type": "Blur", "title": "Soft", "properties": {"cnr_id": "blur-pack"}}
    flow = workflow_file(tmp_path, node)
    left_out = comfyfleet("convert", flow, "--object-info", OBJECT_INFO)
    assert (left_out.code, left_out.json) == (0, {})
    assert "blur-pack" in left_out.err
    kept = comfyfleet("convert", flow, "--object-info", OBJECT_INFO, "--unknown", "keep")
    assert list(kept.json) == ["1"]
    refused = comfyfleet("convert", flow, "--object-info", OBJECT_INFO, "--strict")
    assert (refused.code, refused.out) == (1, "")
    assert 'Blur: node 1 "Soft" (node pack blur-pack)' in refused.err


def test_only_what_outputs_need_can_be_kept(tmp_path: Path) -> None:
    flow = workflow_file(tmp_path, {"id": 1, "type": "EmptyImage"}, {"id": 2, "type": "SaveImage"})
    arguments = ("convert", flow, "--object-info", OBJECT_INFO)
    assert list(comfyfleet(*arguments).json) == ["1", "2"]
    assert list(comfyfleet(*arguments, "--reachable-only").json) == ["2"]


def test_parts_are_switched_before_the_conversion() -> None:
    arguments = ("convert", SOFTEN, "--object-info", OBJECT_INFO)
    assert len(comfyfleet(*arguments).json) == 10
    bypassed = comfyfleet(*arguments, "--bypass", "Soften 2", "--bypass", "group:Pass 3")
    assert [key for key in bypassed.json if ":" in key] == ["2:20", "2:21"]
    assert 'bypassed instance 3 "Soften 2"' in bypassed.lines
    enabled = comfyfleet("convert", NEGATIVE, "--object-info", OBJECT_INFO, "--enable", "Before")
    assert enabled.json["5"]["class_type"] == "PreviewImage"
    wrong = comfyfleet(*arguments, "--mute", "Sofen")
    assert (wrong.code, wrong.out) == (1, "")
    assert "Soften 1" in wrong.lines[0]


def test_the_first_segments_of_a_chain_are_kept() -> None:
    arguments = ("convert", SOFTEN, "--object-info", OBJECT_INFO, "--segments")
    kept = comfyfleet(*arguments, "1")
    assert kept.json["5"]["inputs"]["images.image1"] == ["2:21", 0]
    assert len(kept.json) == 6
    assert kept.lines[0].startswith('kept "Pass 1" of "Pass"')
    assert comfyfleet(*arguments, "9").code == 1
    assert comfyfleet(*arguments, "1", "--chain", "Nothing").code == 1


def test_a_prompt_has_no_parts(prompt_file: str) -> None:
    result = comfyfleet("convert", prompt_file, "--mute", "1")
    assert result.code == 1
    assert result.lines[0].startswith("error: a prompt has no parts to switch")


def test_without_node_types_the_error_says_how_to_get_them() -> None:
    result = comfyfleet("convert", NEGATIVE)
    assert (result.code, result.out) == (1, "")
    assert result.lines[0].startswith("error: a workflow can't be converted without")
    assert "--server http://127.0.0.1:8188" in result.lines[1]
    assert "curl " in result.lines[1]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[]", "it isn't a JSON object"),
        (b"{}", "it is empty"),
        (b'{"nodes": []}', "it is a workflow"),
        (b'{"1": {"class_type": "X"}}', "it is a prompt"),
        (b'{"detail": "Not Found"}', "it has the keys detail"),
        (b"\x1f\x8bxyz", "damaged gzip"),
        (b"nonsense", "not valid JSON"),
    ],
)
def test_a_file_that_is_no_object_info_says_what_it_is(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    path = tmp_path / "info.json"
    path.write_bytes(content)
    result = comfyfleet("convert", NEGATIVE, "--object-info", str(path))
    assert result.code == 1
    assert problem in result.lines[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("convert",), "FILE"),
        (("convert", NEGATIVE, "--bogus"), "--bogus"),
        (("convert", NEGATIVE, "--unknown", "burn"), "burn"),
        (("convert", NEGATIVE, "--seed-rng", "x"), "--seed-rng"),
        (("convert", NEGATIVE, "--server", "x", "--object-info", "y"), "--object-info"),
        (("covert", NEGATIVE), "covert"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    result = comfyfleet(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.lines[0].startswith("error: ")
    assert said in result.lines[0]
    assert result.lines[1].startswith("hint: comfyfleet")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("convert", "--help"), ("inspect", "-h")])
def test_help_teaches(arguments: tuple[str, ...]) -> None:
    result = comfyfleet(*arguments)
    assert result.code == 0
    assert "comfyfleet" in result.out
    assert all(len(line) <= 80 for line in result.out.splitlines())


def test_the_version_is_told() -> None:
    assert comfyfleet("--version").out == f"{__version__}\n"


def test_a_real_process_reads_stdin_and_writes_into_a_pipe() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "COMFYUI_BASE_URL"}
    process = subprocess.run(
        [
            str(Path(sys.executable).with_name("comfyfleet")),
            "convert",
            "-",
            "--object-info",
            OBJECT_INFO,
        ],
        input=(EXAMPLES / "workflows" / "video.json").read_bytes(),
        capture_output=True,
        env={**environment, "FORCE_COLOR": "", "NO_COLOR": "1"},
        timeout=30,
        check=True,
    )
    assert list(json.loads(process.stdout)) == ["1", "2", "3", "4", "5"]
    assert process.stderr == b""
