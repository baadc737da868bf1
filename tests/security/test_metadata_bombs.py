"""Files made to keep whoever takes their prompts out of them busy."""

import resource
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from comfyfleet.delivery import strip_metadata
from comfyfleet.errors import InvalidInput

MEMORY_MAX = 160 * 1024**2
SECONDS_MAX = 60  # it takes a fraction of one; the expression before took hours
STRIP = """
import sys
from pathlib import Path
from comfyfleet.delivery import prepare_file
from comfyfleet.errors import InvalidInput
try:
    print(prepare_file(Path(sys.argv[1]), mark=(sys.argv[2:] or [""])[0] or None).size)
except InvalidInput as error:
    print(error)
"""


def test_many_begins_of_notes_without_an_end_take_one_pass(tmp_path: Path) -> None:
    path = tmp_path / "bomb.svg"
    path.write_bytes(b"<svg><metadata>secret</metadata>" + b"<metadata>" * 400_000)
    # In a process that can be ended: an expression can't be interrupted.
    command = [sys.executable, "-c", STRIP, str(path)]
    subprocess.run(command, check=True, timeout=SECONDS_MAX)
    left = path.read_bytes()
    assert left == b"<svg>" + b"<metadata>" * 400_000


def test_a_model_nested_without_an_end_is_refused(tmp_path: Path) -> None:
    path, length = tmp_path / "bomb.glb", 300_000
    bomb = struct.pack("<4sIII4s", b"glTF", 2, 20 + length, length, b"JSON") + b"[" * length
    path.write_bytes(bomb)
    with pytest.raises(InvalidInput, match="damaged"):
        strip_metadata(path)


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def picture(offset: int, length: int) -> bytes:
    """An AVIF whose Exif is said to lie there."""
    entry = box(b"infe", b"\x02\0\0\0" + struct.pack(">HH", 1, 0) + b"Exif\0")
    items = box(b"iinf", bytes(4) + struct.pack(">H", 1) + entry)
    place = struct.pack(">HHHHQQ", 1, 1, 0, 1, offset, length)
    places = box(b"iloc", bytes(4) + b"\x88\0" + place)
    meta = box(b"meta", bytes(4) + items + places)
    return box(b"ftyp", b"avif\0\0\0\0avifmif1") + meta + box(b"mdat", b"a secret of somebody")


def test_notes_in_a_picture_are_emptied_where_they_lie(tmp_path: Path) -> None:
    path, whole = tmp_path / "note.avif", picture(0, 0)
    at = whole.index(b"a secret")
    path.write_bytes(picture(at, 20))
    assert strip_metadata(path) == len(whole)
    assert b"secret" not in path.read_bytes()


@pytest.mark.parametrize("offset", [2**33, 2**40, 2**62, 2**63, 2**64 - 1])
def test_notes_behind_the_end_of_a_picture_do_not_make_it_grow(tmp_path: Path, offset: int) -> None:
    path, bomb = tmp_path / "bomb.avif", picture(offset, 64)
    path.write_bytes(bomb)
    assert strip_metadata(path) == len(bomb)
    assert path.read_bytes() == bomb


def test_notes_that_go_on_behind_the_end_of_a_picture_are_emptied_up_to_it(tmp_path: Path) -> None:
    path, size = tmp_path / "cut.avif", len(picture(0, 0))
    path.write_bytes(picture(size - 20, 64))
    assert strip_metadata(path) == size
    assert b"secret" not in path.read_bytes()


def strip_in_little_memory(path: Path, mark: str = "") -> str:
    """In a process of its own, which gets no more than that beside what it begins with. Returns the refusal."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX, MEMORY_MAX))

    command = [sys.executable, "-c", STRIP, str(path), mark]
    done = subprocess.run(
        command,
        check=True,
        timeout=SECONDS_MAX,
        preexec_fn=limit,
        stdout=subprocess.PIPE,
        text=True,
    )
    return "" if done.stdout.strip().isdigit() else done.stdout


def sparse(path: Path, begin: bytes, size: int, end: bytes = b"") -> None:
    with path.open("wb") as file:
        file.write(begin)
        file.seek(size - len(end))
        file.write(end)
        file.truncate(size)


def test_a_list_of_items_as_large_as_a_film_is_not_read(tmp_path: Path) -> None:
    path, size = tmp_path / "bomb.avif", 2 * 1024**3
    start = box(b"ftyp", b"avif\0\0\0\0avifmif1")
    inner = size - len(start) - 12
    meta = struct.pack(">I4sI", inner + 12, b"meta", 0)
    items = struct.pack(">I4s", inner - 16, b"iinf") + bytes(4)
    sparse(path, start + meta + items, size, box(b"iloc", bytes(8)))
    assert "unknown layout" in strip_in_little_memory(path)


def test_a_picture_of_tiny_parts_takes_little_more_memory_than_its_size(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    part = struct.pack(">I4sI", 0, b"IDAT", 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + part * (12 * 1024**2 // len(part)))
    strip_in_little_memory(path)


def test_a_film_larger_than_memory_is_marked_in_place(tmp_path: Path) -> None:
    path, size = tmp_path / "film.mp4", 5 * 1024**3
    notes = box(b"moov", box(b"udta", b"a secret of somebody"))
    inner = size - len(notes) - 32
    start = box(b"ftyp", b"isom\0\0\0\0") + struct.pack(">I4sQ", 1, b"mdat", inner + 16)
    sparse(path, start, size, notes)
    strip_in_little_memory(path, mark="trainedAlgorithmicMedia")
    with path.open("rb") as file:
        file.seek(size - len(notes))
        end = file.read()
    assert b"secret" not in end
    assert end.count(b"trainedAlgorithmicMedia") == 1


def manifest(length: int) -> bytes:
    name = bytes.fromhex("d8fec3d61b0e483c92975828877ec481")
    return struct.pack(">I4sQ", 1, b"uuid", 16 + 16 + length) + name


def test_a_manifest_as_large_as_a_film_is_searched_only_to_a_limit(tmp_path: Path) -> None:
    path, size = tmp_path / "bomb.mp4", 2 * MEMORY_MAX
    start = box(b"ftyp", b"isom\0\0\0\0") + box(b"moov", b"")
    sparse(path, start + manifest(size - len(start) - 32), size)
    strip_in_little_memory(path)


def test_many_small_parts_with_marks_take_one_pass(tmp_path: Path) -> None:
    path = tmp_path / "bomb.webp"
    part = struct.pack("<4sI", b"XMP ", 0)
    parts = part * 90_000 + struct.pack("<4sI4sI", b"C2PA", 0, b"VP8 ", 0)
    path.write_bytes(struct.pack("<4sI4s", b"RIFF", 4 + len(parts), b"WEBP") + parts)
    assert strip_in_little_memory(path) == ""


def test_a_compressed_packet_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    body = b"iTXtXML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(bytes(300 * 1024**2), 9)
    part = struct.pack(">I", len(body) - 4) + body + bytes(4)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + part + struct.pack(">I4sI", 0, b"IEND", 0))
    strip_in_little_memory(path)
    assert path.stat().st_size == 8 + 12
