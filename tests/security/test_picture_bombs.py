"""Pictures that are small as files and huge in memory."""

import struct
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import PIL.Image
import pytest

from comfyfleet.engine.node import require_small
from comfyfleet.engine.nodes.files import load_picture
from comfyfleet.errors import LimitExceeded
from comfyfleet.media import measure_picture
from comfyfleet.protocol.payloads import UnforeseenInput
from comfyfleet.protocol.pictures import alpha_only

MEMORY_MIB_MAX = 300


def bomb(side: int) -> bytes:
    """A black picture of one bit per pixel: some 12 kB for 10,000 x 10,000."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    row, packed = b"\0" + bytes((side + 7) // 8), zlib.compressobj(9)
    rows = b"".join(packed.compress(row) for _ in range(side)) + packed.flush()
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bomb") / "bomb.png"
    path.write_bytes(bomb(10_000))
    assert path.stat().st_size < 20_000
    return path


def test_a_bomb_is_refused_before_it_is_decoded(path: Path) -> None:
    with pytest.raises(LimitExceeded, match="10000x10000"):
        load_picture(path)
    with pytest.raises(UnforeseenInput, match="10000x10000"):
        alpha_only(path, require_small)


def test_refusing_it_takes_little_memory(path: Path) -> None:
    program = """
        import re, sys
        from pathlib import Path
        from comfyfleet.engine.nodes.files import load_picture
        from comfyfleet.errors import LimitExceeded
        try:
            load_picture(Path(sys.argv[1]))
        except LimitExceeded:
            # Its own peak: ru_maxrss also counts what its parent had when it was forked.
            status = Path("/proc/self/status").read_text()
            print(int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) // 1024)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert int(said.stdout) < MEMORY_MIB_MAX


def test_a_jpeg_can_not_hide_its_size_behind_other_parts(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    PIL.Image.new("L", (9000, 9000)).save(path, "JPEG")
    data = path.read_bytes()
    filler = b"\xff\xe2\xff\xff" + bytes(0xFFFD)
    path.write_bytes(data[:2] + filler * 20 + data[2:])
    with pytest.raises(LimitExceeded, match="9000x9000"):
        load_picture(path)


@pytest.mark.parametrize("kind", ["AVIF", "PNG", "GIF", "WEBP", "JPEG"])
def test_the_header_tells_the_size_of_every_kind_of_picture(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    PIL.Image.new("RGB", (301, 77)).save(path, kind)
    assert measure_picture(path) == (301, 77)


def shrunk(tmp_path: Path, source: Path, pixels_max: int = 64_000_000) -> Path | None:
    """By the process that makes small pictures, as the control plane starts it."""
    to = tmp_path / "small"
    module = "comfyfleet.protocol.small_picture"
    command = [sys.executable, "-m", module, str(source), str(to), str(pixels_max)]
    ended = subprocess.run(command, check=False, timeout=60)
    return to if ended.returncode == 0 else None


def test_no_small_picture_is_made_of_a_bomb(path: Path, tmp_path: Path) -> None:
    assert shrunk(tmp_path, path) is None
    # Its header is trusted by nobody: the process has no more memory than it needs for a picture.
    lying = bytearray(path.read_bytes())
    lying[16:24] = struct.pack(">II", 100, 100)
    lying[29:33] = struct.pack(">I", zlib.crc32(bytes(lying[12:29])))
    short = tmp_path / "lying.png"
    short.write_bytes(bytes(lying))
    found = shrunk(tmp_path, short)
    if found is not None:
        with PIL.Image.open(found) as small:
            assert small.size == (100, 100)


def test_a_small_picture_stands_as_its_picture_does(tmp_path: Path) -> None:
    turned = PIL.Image.Exif()
    turned[0x0112] = 6  # it is shown turned by 90 degrees
    source = tmp_path / "a.jpg"
    PIL.Image.new("RGB", (1600, 800)).save(source, "JPEG", exif=turned)
    found = shrunk(tmp_path, source)
    assert found is not None
    with PIL.Image.open(found) as small:
        assert (small.size, dict(small.getexif())) == ((256, 512), {})


@pytest.mark.parametrize("mode", ["I;16", "CMYK"])
def test_no_small_picture_is_made_that_would_look_different(tmp_path: Path, mode: str) -> None:
    source = tmp_path / "a"
    PIL.Image.new(mode, (800, 800)).save(source, "PNG" if mode == "I;16" else "JPEG")
    assert shrunk(tmp_path, source) is None


def test_what_is_seen_through_stays_so(tmp_path: Path) -> None:
    source = tmp_path / "a.png"
    PIL.Image.new("RGBA", (800, 400), (255, 0, 0, 0)).save(source)
    found = shrunk(tmp_path, source)
    assert found is not None
    with PIL.Image.open(found) as small:
        assert (small.mode, small.size) == ("RGBA", (512, 256))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other limits")
def test_a_process_that_decodes_pictures_has_limits_of_memory_time_and_files() -> None:
    program = """
        import resource
        from comfyfleet.protocol import picture_process

        def show(*words):
            limits = (resource.RLIMIT_DATA, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE)
            print(*(resource.getrlimit(limit)[0] for limit in limits))
            return 0

        picture_process._show = show
        picture_process.main("show")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    memory, seconds, written = map(int, said.stdout.split())
    mib = 1024**2
    assert 1536 * mib < memory < 2048 * mib  # with what it had before
    assert (seconds, written) == (25, 512 * mib)
