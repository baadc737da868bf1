"""Files that make FFmpeg read other files: playlists, lists of files, descriptions of streams."""

from fractions import Fraction
from pathlib import Path
from typing import cast

import av
import numpy as np
import PIL.Image
import pytest

from comfyfleet.engine.codecs import decode, encode_mp4, encode_webm, frame_size, open_media
from comfyfleet.errors import NodeFailed
from comfyfleet.server.maintenance.checks import probe_video

PLAYLIST = "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n"
FRAMES = np.full((8, 16, 32, 3), 0.5, np.float32)
SESSION = b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\nm=video 9 RTP/AVP 96\r\n"


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("output") / "secret_00001_.mp4"
    encode_mp4(FRAMES, Fraction(8), path, audio=None, tags={})
    return path


def frames_of(path: Path) -> int:
    try:
        return len(decode(path).images)
    except NodeFailed:
        return 0


@pytest.mark.parametrize("name", ["x.m3u8", "x.mp4", "x.png", "x"])
@pytest.mark.parametrize("segment", ["{path}", "file://{path}", "../{parent}/{name}"])
def test_a_playlist_opens_no_other_file(
    tmp_path: Path, secret: Path, name: str, segment: str
) -> None:
    named = segment.format(path=secret, parent=secret.parent.name, name=secret.name)
    path = tmp_path / name
    path.write_text(PLAYLIST.format(named))
    assert frames_of(path) == 0


@pytest.mark.parametrize("name", ["x.ffconcat", "x.mp4"])
def test_a_list_of_files_opens_none_of_them(tmp_path: Path, secret: Path, name: str) -> None:
    (tmp_path / "beside.mp4").write_bytes(secret.read_bytes())
    path = tmp_path / name
    path.write_text("ffconcat version 1.0\nfile beside.mp4\n")
    assert frames_of(path) == 0


def test_a_pattern_in_a_name_reads_no_sequence(tmp_path: Path) -> None:
    for number in range(3):
        PIL.Image.new("RGB", (8, 8), number).save(tmp_path / f"other{number}.png")
    assert frames_of(tmp_path / "other%d.png") == 0


@pytest.mark.parametrize("data", [SESSION, b"ID3\3\0\0\0\0\0\0" + SESSION])
def test_a_description_of_a_stream_is_not_followed(data: bytes) -> None:
    assert probe_video(data) == {}


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_pictures_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind.lower()}"
    PIL.Image.new("RGB", (32, 16), "red").save(path, kind)
    assert frame_size(path) == (32, 16)


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("mp3", "libmp3lame"),
        ("wav", "pcm_s16le"),
        ("flac", "flac"),
        ("ogg", "libopus"),
        ("mov", "aac"),
        ("matroska", "aac"),
        ("avi", "pcm_s16le"),
    ],
)
def test_sounds_and_films_are_opened(tmp_path: Path, container: str, codec: str) -> None:
    path = tmp_path / f"a.{container}"
    with av.open(str(path), "w", format=container) as output:
        stream = cast(av.AudioStream, output.add_stream(codec, rate=48000))
        samples = np.zeros((1, 4800 * 2), np.int16)
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="stereo")
        frame.rate = 48000
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            output.mux(packet)
    with open_media(path) as found:
        assert found.streams.audio
    assert probe_video(path.read_bytes())["duration_seconds"] > 0


def test_videos_are_opened(tmp_path: Path, secret: Path) -> None:
    encode_webm(FRAMES, 8.0, tmp_path / "a.webm", codec="vp9", crf=32, tags={})
    assert len(decode(tmp_path / "a.webm").images) == 8
    assert len(decode(secret).images) == 8
