import io
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import PIL.Image
import pytest

from comfyfleet.engine.codecs import (
    BuiltVideo,
    ClipWindow,
    FileVideo,
    decode,
    duration_s,
    encode_mp4,
    encode_webm,
    frame_size,
    rounded_rate,
    save_mp4,
)
from comfyfleet.engine.image_math import Audio, Image
from comfyfleet.errors import NodeFailed

RATE = 8000


def shades(count: int = 8, width: int = 32, height: int = 16) -> Image:
    """Frames that become brighter."""
    levels = np.linspace(0.1, 0.9, count, dtype=np.float32)
    return np.broadcast_to(levels[:, None, None, None], (count, height, width, 3)).copy()


def tone(seconds: float = 1.0, channels: int = 1) -> Audio:
    time = np.arange(int(RATE * seconds)) / RATE
    wave = np.sin(2 * np.pi * 440 * time).astype(np.float32)
    return Audio(np.broadcast_to(wave, (1, channels, len(wave))).copy(), RATE)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One second, 8 frames, with sound."""
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    encode_mp4(shades(), Fraction(8), path, audio=tone(), tags={"prompt": "{}"})
    return path


def grey_png(folder: Path, mode: str, value: int) -> Path:
    path = folder / f"{mode}.png"
    PIL.Image.new(mode, (37, 5), value).save(path)
    return path


def test_rgb_bytes_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "rgb.png"
    PIL.Image.new("RGB", (37, 5), (255, 128, 1)).save(path)
    loaded = decode(path)
    assert loaded.images.shape == (1, 5, 37, 3)
    assert (loaded.images[0, 4, 36] * 255).tolist() == pytest.approx([255, 128, 1])
    assert loaded.mask is None
    assert loaded.fps == 25


def test_white_in_grey_is_not_quite_white(tmp_path: Path) -> None:
    white = decode(grey_png(tmp_path, "L", 255)).images
    assert white.shape == (1, 5, 37, 3)
    assert (white * 255).astype(int).max() == 254


def test_sixteen_bits_keep_their_precision(tmp_path: Path) -> None:
    deep = decode(grey_png(tmp_path, "I;16", 1000)).images
    assert deep == pytest.approx(1000 / 65535, abs=1e-5)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_a_format_with_alpha_has_a_mask_of_the_pictures_size(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "alpha.png"
    PIL.Image.new("RGBA", (6, 4), (9, 9, 9, 0)).convert(mode).save(path)
    mask = decode(path).mask
    assert mask is not None
    assert mask.shape == (1, 4, 6)


def test_transparent_pixels_keep_their_colours(tmp_path: Path) -> None:
    path = tmp_path / "alpha.png"
    PIL.Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(path)
    loaded = decode(path)
    assert loaded.images[0, 0, 0].tolist() == [1, 0, 0]
    assert loaded.mask is not None
    assert loaded.mask.min() == 1


def test_a_turned_photo_is_loaded_upright(tmp_path: Path) -> None:
    path = tmp_path / "turned.jpg"
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.new("RGB", (48, 32), (10, 200, 30)).save(path, exif=exif)
    assert decode(path).images.shape == (1, 48, 32, 3)
    assert frame_size(path) == (48, 32)


def test_what_is_no_media_file_can_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    with pytest.raises(NodeFailed, match=r"can't read empty\.png") as told:
        decode(tmp_path / "empty.png")
    assert str(tmp_path) not in told.value.message


def test_a_video_comes_back_with_frames_rate_and_sound(clip: Path) -> None:
    parts = decode(clip)
    assert parts.images.shape == (8, 16, 32, 3)
    assert parts.fps == 8
    assert parts.images[:, 0, 0, 0] == pytest.approx(np.linspace(0.1, 0.9, 8), abs=0.03)
    assert parts.audio is not None
    assert parts.audio.sample_rate == RATE
    assert duration_s(clip) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("window", "frames"),
    [
        (ClipWindow(0.25, 0.5), 4),
        (ClipWindow(0.5), 4),
        (ClipWindow(0.5, 5.0), 4),
        (ClipWindow(-0.25), 2),
        (ClipWindow(-5.0), 8),
        (ClipWindow(3.0), 0),
    ],
)
def test_a_window_cuts_frames(clip: Path, window: ClipWindow, frames: int) -> None:
    assert len(decode(clip, window).images) == frames


def test_a_window_cuts_the_sound_as_well(clip: Path) -> None:
    audio = decode(clip, ClipWindow(0.25, 0.5)).audio
    assert audio is not None
    assert audio.waveform.shape == (1, 1, RATE // 2)


def test_a_part_of_a_part_counts_from_the_first_start(clip: Path) -> None:
    part = FileVideo(clip).part(0.25, 0.5, strict=True).part(0.25, 0.25, strict=True)
    assert part.window == ClipWindow(0.5, 0.25)
    assert len(part.components().images) == 2


def test_a_part_that_is_too_long_fails_only_if_strict(clip: Path) -> None:
    assert FileVideo(clip).part(0.5, 5.0, strict=False).duration_s == pytest.approx(0.5, abs=0.05)
    with pytest.raises(NodeFailed, match="too short"):
        FileVideo(clip).part(0.5, 5.0, strict=True)


def test_a_built_video_is_encoded_before_it_is_cut() -> None:
    built = BuiltVideo(shades(), Fraction(8))
    part = built.part(0.25, 0.5, strict=False)
    assert isinstance(part.source, bytes)
    assert len(part.components().images) == 4
    with pytest.raises(NodeFailed, match="too short"):
        built.part(0.5, 1.0, strict=False)


def test_a_built_video_gives_back_the_very_same_floats() -> None:
    images = shades() + 0.5
    assert BuiltVideo(images, Fraction(8)).components().images is images


def copied_streams(path: Path) -> dict[str, str]:
    with av.open(str(path)) as container:
        codec = container.streams.video[0].codec.canonical_name
        return {"video": codec, **container.metadata}


def test_an_unchanged_video_is_copied_with_new_tags(clip: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy.mp4"
    FileVideo(clip).save(target, format="mp4", codec="h264", tags={"workflow": '"w"'})
    streams = copied_streams(target)
    assert streams["workflow"] == '"w"'
    assert streams["prompt"] == "{}"
    assert (decode(target).images == decode(clip).images).all()


def test_a_part_is_encoded_anew(clip: Path, tmp_path: Path) -> None:
    target = tmp_path / "part.mp4"
    FileVideo(clip, ClipWindow(0.25, 0.5)).save(target, format="auto", codec="auto", tags={})
    parts = decode(target)
    assert len(parts.images) == 4
    assert parts.fps == 8
    assert parts.audio is not None
    assert parts.audio.waveform.shape[2] == pytest.approx(RATE // 2, abs=1024)


def test_a_webm_may_be_copied_into_mp4_or_encoded(tmp_path: Path) -> None:
    source = tmp_path / "a.webm"
    encode_webm(shades(2), 8.0, source, codec="vp9", crf=40.0, tags={"prompt": "{}"})
    save_mp4(source, ClipWindow(), tmp_path / "b.mp4", format="auto", codec="auto", tags={})
    save_mp4(source, ClipWindow(), tmp_path / "c.mp4", format="mp4", codec="auto", tags={})
    assert copied_streams(tmp_path / "b.mp4")["video"] == "vp9"
    assert copied_streams(tmp_path / "c.mp4")["video"] == "h264"


def test_webm_keeps_alpha_and_odd_sizes(tmp_path: Path) -> None:
    rgba = np.full((1, 15, 31, 4), 0.5, np.float32)
    encode_webm(rgba, 8.0, tmp_path / "a.webm", codec="vp9", crf=40.0, tags={})
    assert frame_size(tmp_path / "a.webm") == (31, 15)
    with av.open(str(tmp_path / "a.webm")) as container:
        assert container.streams.video[0].metadata["alpha_mode"] == "1"


def test_ten_bits_stay_ten_bits(tmp_path: Path) -> None:
    deep = BuiltVideo(shades(2), Fraction(8), bit_depth=10)
    deep.save(tmp_path / "deep.mp4", format="auto", codec="auto", tags={})
    assert FileVideo(tmp_path / "deep.mp4").bit_depth == 10


@pytest.mark.parametrize("shape", [(1, 15, 32, 3), (1, 16, 32, 4), (0, 16, 32, 3)])
def test_what_h264_can_not_hold_fails_and_leaves_no_file(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    target = tmp_path / "bad.mp4"
    with pytest.raises(NodeFailed):
        encode_mp4(np.zeros(shape, np.float32), Fraction(8), target)
    assert not target.exists()


def test_a_turned_video_is_encoded_upright(tmp_path: Path) -> None:
    photo = tmp_path / "turned.jpg"
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.new("RGB", (48, 32), (10, 200, 30)).save(photo, exif=exif)
    save_mp4(photo, ClipWindow(), tmp_path / "up.mp4", format="mp4", codec="h264", tags={})
    assert frame_size(tmp_path / "up.mp4") == (32, 48)
    assert decode(tmp_path / "up.mp4").images[0, 20, 20] == pytest.approx(
        np.array([10, 200, 30]) / 255, abs=0.03
    )


def test_a_part_without_frames_or_with_odd_sides_can_not_be_encoded(
    clip: Path, tmp_path: Path
) -> None:
    with pytest.raises(NodeFailed, match="no frame"):
        save_mp4(clip, ClipWindow(3.0), tmp_path / "a.mp4", format="auto", codec="auto", tags={})
    PIL.Image.new("RGB", (37, 5)).save(tmp_path / "odd.png")
    with pytest.raises(NodeFailed, match="even width and height"):
        save_mp4(
            tmp_path / "odd.png",
            ClipWindow(),
            tmp_path / "a.mp4",
            format="mp4",
            codec="h264",
            tags={},
        )


def test_stereo_sound_is_cut_to_the_length_of_the_pictures(tmp_path: Path) -> None:
    encoded = io.BytesIO()
    encode_mp4(shades(4), Fraction(8), encoded, audio=tone(5.0, channels=2))
    audio = decode(encoded.getvalue()).audio
    assert audio is not None
    assert audio.waveform.shape[1] == 2
    assert audio.waveform.shape[2] < RATE


def test_rates_are_kept_in_thousandths() -> None:
    assert rounded_rate(24000 / 1001) == Fraction(2997, 125)
