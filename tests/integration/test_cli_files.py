"""Files that can't be opened end in one line that says what to do next."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.server.commands import NEGATIVE, OBJECT_INFO, comfyfleet


def failed(*arguments: str, stdin: bytes = b"") -> list[str]:
    result = comfyfleet(*arguments, stdin=stdin)
    assert (result.code, result.out) == (1, "")
    return result.lines


def test_a_missing_file_names_the_closest_ones(tmp_path: Path) -> None:
    (tmp_path / "portrait.json").write_text("{}")
    lines = failed("inspect", str(tmp_path / "potrait.json"))
    assert lines == [
        f"error: file {tmp_path / 'potrait.json'} was not found",
        f"hint: Did you mean: {tmp_path / 'portrait.json'}?",
    ]
    assert failed("inspect", str(tmp_path / "q"))[1] == "hint: Use - to read from stdin."


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    out = tmp_path / "no" / "prompt.json"
    lines = failed("convert", NEGATIVE, "--object-info", OBJECT_INFO, "-o", str(out))
    assert lines[-2:] == [
        f"error: directory {tmp_path / 'no'} doesn't exist",
        f"hint: Create it with: mkdir -p {tmp_path / 'no'}",
    ]


def test_a_directory_names_files_in_it(tmp_path: Path) -> None:
    assert failed("inspect", str(tmp_path))[1].startswith("hint: Specify a file saved by ComfyUI")
    (tmp_path / "cat.png").write_bytes(b"")
    (tmp_path / "notes.txt").write_bytes(b"")
    assert failed("inspect", str(tmp_path)) == [
        f"error: {tmp_path} is a directory",
        f"hint: Specify a file in it, such as {tmp_path / 'cat.png'}",
    ]


def test_output_into_a_directory_is_refused(tmp_path: Path) -> None:
    lines = failed("convert", NEGATIVE, "--object-info", OBJECT_INFO, "-o", str(tmp_path))
    assert f"error: {tmp_path} is a directory" in lines


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "flow.json"
    path.touch(mode=0)
    assert failed("inspect", str(path))[0] == f"error: {path}: permission denied"


def test_a_name_that_no_file_can_have() -> None:
    assert failed("inspect", "x" * 5000)[0].startswith("error: ")


def test_what_is_wrong_inside_a_file_is_said_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "cat.gif"
    path.write_bytes(b"GIF89a...")
    assert failed("inspect", str(path))[0].startswith(f"error: {path}: The file is a GIF image")
    path.write_bytes(b"")
    assert failed("inspect", str(path))[0].startswith(f"error: {path}: The file is empty")
    assert failed("inspect", "-", stdin=b'{"nodes": 5}')[0].startswith("error: stdin: ")


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "flow.json"
    node = {"id": 1, "type": "Evil\x1b]0;owned\x07", "title": "[red]x\x1b[2J"}
    path.write_text(json.dumps({"nodes": [node], "links": [], "version": 0.4}))
    result = comfyfleet("inspect", str(path), "--object-info", OBJECT_INFO)
    assert "\x1b" not in result.out + result.err
    assert "Evil?]0;owned?" in result.out


def test_a_file_on_stdin_is_mapped_and_a_reader_that_goes_away_is_no_crash() -> None:
    command = f'"{Path(sys.executable).with_name("comfyfleet")}" inspect - --json'
    process = subprocess.run(
        ["bash", "-c", f'{command} <"{NEGATIVE}" | true; echo ${{PIPESTATUS[0]}}'],
        capture_output=True,
        timeout=30,
        check=True,
    )
    assert process.stderr == b""
    assert process.stdout == b"1\n"
