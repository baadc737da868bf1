"""Files of the gateway's clients have the prompt that the client sent, without folders of the backend."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from tests.unit import saved_files

from comfyfleet.worker.files import correct_prompt
from comfyfleet.workflow.embedded import open_document

OWN_NAME = "comfyfleet/SECRET-FOLDER/"


def prompt(folder: str) -> dict[str, object]:
    inputs = {"filename_prefix": f"{folder}made"}
    return {"9": {"class_type": "SaveVideo", "inputs": inputs}}


SENT, RUN = prompt(""), prompt(OWN_NAME)
TEXTS = {"prompt": json.dumps(RUN), "workflow": json.dumps({"nodes": [], "links": []})}
COMMENT = {"comment": json.dumps(TEXTS)}


def webp() -> bytes:
    """SaveAnimatedWEBP: the prompt as the camera's model."""
    tags = Image.Exif()
    tags[0x0110] = f"prompt:{TEXTS['prompt']}"
    tags[0x010F] = f"workflow:{TEXTS['workflow']}"
    return saved_files.webp(tags)


FILES: dict[str, Callable[[], bytes]] = {
    "webp": webp,
    "mp4": lambda: saved_files.video("mp4", TEXTS),
    "mov": lambda: saved_files.video("mov", TEXTS),
    "webm": lambda: saved_files.video("webm", TEXTS),
    "matroska": lambda: saved_files.video("matroska", TEXTS),
    "mp4 with a comment": lambda: saved_files.video("mp4", COMMENT, tagged=False),
    "webm with a comment": lambda: saved_files.video("webm", COMMENT),
    "flac": lambda: saved_files.sound("flac", "flac", TEXTS),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_gets_the_prompt_of_the_client(name: str, tmp_path: Path) -> None:
    path, data = tmp_path / "file", FILES[name]()
    path.write_bytes(data)
    assert OWN_NAME.encode() in data
    assert correct_prompt(path, json.dumps(SENT)) == len(data)
    after = path.read_bytes()
    assert len(after) == len(data)
    assert b"SECRET-FOLDER" not in after
    opened = open_document(after)
    assert opened.prompt == SENT
    assert opened.workflow == open_document(data).workflow


@pytest.mark.parametrize("name", FILES)
def test_a_prompt_that_is_too_long_for_its_place_is_removed(name: str, tmp_path: Path) -> None:
    path, data = tmp_path / "file", FILES[name]()
    path.write_bytes(data)
    correct_prompt(path, json.dumps(prompt("x" * 1000)))
    after = path.read_bytes()
    assert len(after) == len(data)
    assert b"SECRET-FOLDER" not in after
    assert open_document(after).workflow == open_document(data).workflow


@pytest.mark.parametrize("data", [b"", b"no file", saved_files.video("mp4", {})])
def test_files_without_a_prompt_stay_as_they_are(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    assert correct_prompt(path, json.dumps(SENT)) == len(data)
    assert path.read_bytes() == data


def test_a_checksum_of_tags_is_corrected(tmp_path: Path) -> None:
    path, data = tmp_path / "file", saved_files.video("matroska", TEXTS)
    path.write_bytes(data)
    correct_prompt(path, json.dumps(SENT))
    after = path.read_bytes()
    at = after.rindex(b"\x12\x54\xc3\x67")  # the first one is in the index
    width = 9 - after[at + 4].bit_length()
    size = int.from_bytes(after[at + 4 : at + 4 + width], "big") & (1 << 7 * width) - 1
    tags = after[at + 4 + width :][:size]
    assert tags[:2] == b"\xbf\x84"
    assert tags[2:6] == zlib.crc32(tags[6:]).to_bytes(4, "little")


def test_a_signed_film_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = saved_files.video("mp4", TEXTS) + saved_files.box(b"uuid", b"c2pa.claim")
    path.write_bytes(data)
    correct_prompt(path, json.dumps(SENT))
    assert path.read_bytes() == data
