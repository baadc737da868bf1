"""The limit of the parts of a file from which a prompt is removed. It applies to all levels of a file together."""

import struct
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import pytest
from tests.unit.saved_files import box

from comfyfleet.delivery import strip_metadata
from comfyfleet.errors import InvalidInput
from comfyfleet.media import BYTES_PER_PART, PARTS_MAX

PARENTS = 50
MP4_START = box(b"ftyp", b"isom\0\0\0\0")
WEBM_START = bytes.fromhex("1a45dfa3 87 4282 84") + b"webm"
SEGMENT, CLUSTER = bytes.fromhex("18538067"), bytes.fromhex("1f43b675")
OPEN = bytes.fromhex("01ffffffffffffff")  # a length that is not known yet


def shares(count: int) -> list[int]:
    """Spreads parts over parents."""
    usual = count // PARENTS
    return [usual] * (PARENTS - 1) + [count - usual * (PARENTS - 1)]


def element(name: bytes, content: bytes) -> bytes:
    return name + b"\x01" + len(content).to_bytes(7, "big") + content


def block(length: int) -> bytes:
    return b"\xa3" + struct.pack(">I", 0x10000000 | length) + bytes(length)


def mp4(count: int) -> bytes:
    shared = shares(count - 2 - PARENTS)
    return MP4_START + box(b"moov", *(box(b"trak", box(b"tkhd", b"") * each) for each in shared))


def fragmented_mp4(count: int) -> bytes:
    shared = shares(count - 2 - PARENTS)
    return MP4_START + b"".join(
        (
            box(b"moov", b""),
            *(box(b"moof", box(b"mfhd", b"") * each) for each in shared),
        )
    )


def mp4_with_notes(count: int) -> bytes:
    return MP4_START + box(b"moov", b"") + box(b"free", b"") * (count - 2)


def webm(count: int) -> bytes:
    shared = shares(count - 2 - PARENTS)
    return WEBM_START + element(
        SEGMENT, b"".join(element(CLUSTER, b"\xa3\x80" * each) for each in shared)
    )


def png(count: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sI", 0, b"IDAT", 0) * count


def jpeg(count: int) -> bytes:
    return b"\xff\xd8" + b"\xff\xdb\0\2" * (count - 2) + b"\xff\xda\0\2\xff\xd9"


def webp(count: int) -> bytes:
    chunks = struct.pack("<4sI", b"VP8 ", 0) * count
    return struct.pack("<4sI4s", b"RIFF", 4 + len(chunks), b"WEBP") + chunks


def wav(count: int) -> bytes:
    chunks = struct.pack("<4sI", b"fact", 0) * count
    return struct.pack("<4sI4s", b"RIFF", 4 + len(chunks), b"WAVE") + chunks


def flac(count: int) -> bytes:
    return b"fLaC" + b"\1\0\0\0" * (count - 1) + b"\x81\0\0\0"


Build = Callable[[int], bytes]
BUILDS: list[Build] = [mp4, fragmented_mp4, mp4_with_notes, webm, png, jpeg, webp, wav, flac]


def limit_of(data: bytes) -> int:
    return PARTS_MAX + len(data) // BYTES_PER_PART


def most_parts(build: Build) -> int:
    """Returns the largest count of parts that is allowed for a file of that many."""
    count = PARTS_MAX
    while (limit := limit_of(build(count + 1))) > count:
        count = limit
    return count


@pytest.mark.parametrize("build", BUILDS)
def test_a_file_has_as_many_parts_as_allowed_and_one_more_is_refused(
    build: Build, tmp_path: Path
) -> None:
    path, count = tmp_path / "file", most_parts(build)
    path.write_bytes(build(count))
    strip_metadata(path)
    path.write_bytes(build(count + 1))
    with pytest.raises(InvalidInput, match="unknown layout"):
        strip_metadata(path)


def test_blocks_of_a_live_stream_are_counted_before_they_are_searched(tmp_path: Path) -> None:
    path = tmp_path / "live.webm"
    path.write_bytes(WEBM_START + SEGMENT + OPEN + CLUSTER + OPEN + b"\xa3\x80" * 2 * PARTS_MAX)
    with pytest.raises(InvalidInput, match="unknown layout"):
        strip_metadata(path)


def test_a_film_of_two_hours_in_fragments_of_a_second_is_prepared(tmp_path: Path) -> None:
    path, seconds = tmp_path / "film.mp4", 7200
    tracks = [
        box(b"traf", box(b"tfhd", bytes(8)), box(b"tfdt", bytes(8)), box(b"trun", bytes(each)))
        for each in (200, 400)
    ]
    fragment = box(b"moof", box(b"mfhd", bytes(8)), *tracks) + box(b"mdat", bytes(2000))
    note = box(b"udta", b"a secret of somebody")
    path.write_bytes(MP4_START + box(b"moov", note) + fragment * seconds)
    strip_metadata(path)
    assert b"secret" not in path.read_bytes()


@pytest.mark.parametrize("length", [None, OPEN])
def test_a_film_with_a_block_per_picture_and_sound_is_prepared(
    length: bytes | None, tmp_path: Path
) -> None:
    """25 minutes at about 180 kbit/s: 25 pictures and 49 pieces of sound a second."""
    path, seconds = tmp_path / "film.webm", 25 * 60
    picture, sound = block(600), block(160)
    blocks = b"".join(islice(cycle([picture, sound, sound]), 74))
    cluster = element(CLUSTER, blocks) if length is None else CLUSTER + OPEN + blocks
    tags = element(bytes.fromhex("1254c367"), b"a secret of somebody")
    path.write_bytes(WEBM_START + SEGMENT + OPEN + tags + cluster * seconds)
    strip_metadata(path)
    assert b"secret" not in path.read_bytes()
