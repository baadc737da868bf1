"""Nodes that read and write files, and our own ones."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from tests.unit.engine.node_runs import NODES, PromptRun, RecordingContext, folders_in, run

from comfyfleet.errors import NodeFailed


@pytest.fixture
def context(tmp_path: Path) -> RecordingContext:
    return RecordingContext(folders_in(tmp_path), {"1": {}}, {"workflow": {"n": 1}})


def picture(context: RecordingContext, name: str, *frames: tuple[int, int, int]) -> None:
    first, *rest = [PIL.Image.new("RGB", (16, 8), color) for color in frames]
    path = context.folders.input / name
    path.parent.mkdir(exist_ok=True)
    first.save(path, save_all=bool(rest), append_images=rest)


def shades(count: int = 3) -> Any:
    levels = np.linspace(0.1, 0.9, count, dtype=np.float32)
    return np.broadcast_to(levels[:, None, None, None], (count, 8, 16, 3))


def test_an_image_without_alpha_has_a_small_empty_mask(context: RecordingContext) -> None:
    picture(context, "sub/a.png", (255, 0, 51))
    image, mask = run("LoadImage", context, image="sub/a.png").outputs
    assert image.shape == (1, 8, 16, 3)
    assert image[0, 0, 0].tolist() == pytest.approx([1, 0, 0.2])
    assert mask.shape == (1, 64, 64)
    assert not mask.any()


def test_animated_pictures_are_loaded_as_batches(context: RecordingContext) -> None:
    picture(context, "a.gif", (255, 0, 0), (0, 255, 0))
    picture(context, "a.webp", (255, 0, 0), (0, 255, 0), (0, 0, 255))
    assert len(run("LoadImage", context, image="a.gif").outputs[0]) == 2
    image, mask = run("LoadImage", context, image="a.webp").outputs
    assert len(image) == len(mask) == 3


def test_a_truncated_picture_is_loaded_as_far_as_it_goes(context: RecordingContext) -> None:
    noise = np.random.default_rng(1).integers(0, 255, (64, 64, 3), np.uint8)
    path = context.folders.input / "a.png"
    PIL.Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:6000])
    (image,) = run("LoadImage", context, image="a.png").outputs[0]
    assert image[0].any()
    assert not image[-1].any()


def test_a_text_is_no_picture(context: RecordingContext) -> None:
    (context.folders.input / "a.png").write_text("nothing to see")
    with pytest.raises(NodeFailed, match="cannot identify image file") as caught:
        run("LoadImage", context, image="a.png")
    assert caught.value.details["exception_type"] == "PIL.UnidentifiedImageError"


def test_a_mask_is_a_channel_or_the_inverse_of_alpha(context: RecordingContext) -> None:
    path = context.folders.input / "a.png"
    PIL.Image.new("RGBA", (3, 2), (255, 51, 0, 255)).save(path)

    def mean(channel: str) -> float:
        (mask,) = run("LoadImageMask", context, image="a.png", channel=channel).outputs
        assert mask.shape == (1, 2, 3)
        return float(mask.mean())

    assert [mean(channel) for channel in ("alpha", "red", "green", "blue")] == pytest.approx(
        [0, 1, 0.2, 0]
    )


def test_loaders_notice_that_a_file_has_changed(context: RecordingContext) -> None:
    picture(context, "a.png", (1, 2, 3))
    for class_type, name in (("LoadImage", "image"), ("LoadVideo", "file")):
        fingerprint = NODES[class_type].fingerprint
        assert fingerprint
        first = fingerprint(context.folders, {name: "a.png"})
        assert fingerprint(context.folders, {name: "a.png"}) == first
        with pytest.raises(OSError, match="missing"):
            fingerprint(context.folders, {name: "missing.png"})


def test_loaders_describe_themselves_with_the_files_that_are_there(
    context: RecordingContext,
) -> None:
    picture(context, "a.png", (1, 2, 3))
    (context.folders.input / "b.mp4").touch()
    image = NODES["LoadImage"].describe(context.folders)["input"]["required"]["image"]
    assert image == [["a.png"], {"image_upload": True}]
    video = NODES["LoadVideo"].describe(context.folders)["input"]["required"]["file"]
    assert video[1]["options"] == ["b.mp4"]
    assert NODES["LoadImage"].info["input"]["required"]["image"][0] == []


def test_images_are_saved_and_handed_on(context: RecordingContext) -> None:
    images = shades(2)
    result = run("SaveImage", context, images=images, filename_prefix="x")
    assert result.outputs[0] is images
    assert result.ui == {
        "images": [
            {"filename": f"x_0000{n}_.png", "subfolder": "", "type": "output"} for n in (1, 2)
        ]
    }


def test_a_preview_carries_the_prompt(context: RecordingContext) -> None:
    result = run("PreviewImage", context, images=shades(1))
    assert result.ui is not None
    with PIL.Image.open(context.folders.temp / result.ui["images"][0]["filename"]) as saved:
        assert json.loads(saved.info["prompt"]) == {"1": {}}


def test_an_animated_webp_carries_prompt_and_workflow(context: RecordingContext) -> None:
    options = {"fps": 6.0, "lossless": True, "quality": 80, "method": "fastest"}
    result = run(
        "SaveAnimatedWEBP", context, images=shades(), filename_prefix="%batch_num%", **options
    )
    assert result.ui is not None
    assert result.ui["animated"] == (True,)
    name = result.ui["images"][0]["filename"]
    assert name == "%batch_num%_00001_.webp"
    with PIL.Image.open(context.folders.output / name) as saved:
        assert getattr(saved, "n_frames", 1) == 3
        exif = saved.getexif()
        assert exif[0x0110] == 'prompt:{"1": {}}'
        assert exif[0x010F] == 'workflow:{"n": 1}'


def test_an_animated_png_of_one_image_is_not_animated(context: RecordingContext) -> None:
    options = {"filename_prefix": "x", "fps": 6.0, "compress_level": 4}
    result = run("SaveAnimatedPNG", context, images=shades(1), **options)
    assert result.ui is not None
    assert "animated" not in result.ui
    run("SaveAnimatedPNG", context, images=shades(), **options)
    content = (context.folders.output / "x_00002_.png").read_bytes()
    assert b'comfprompt\0{"1": {}}' in content
    assert b'comfworkflow\0{"n": 1}' in content


def test_a_video_is_built_saved_loaded_and_taken_apart(context: RecordingContext) -> None:
    (built,) = run("CreateVideo", context, images=shades(), fps=12.5).outputs
    options = {"filename_prefix": "v/c_%width%x%height%", "format": "auto", "codec": "auto"}
    result = run("SaveVideo", context, video=built, **options)
    assert result.ui == {
        "images": [{"filename": "c_16x8_00001_.mp4", "subfolder": "v", "type": "output"}],
        "animated": (True,),
    }
    (loaded,) = run("LoadVideo", context, file="v/c_16x8_00001_.mp4 [output]").outputs
    images, audio, fps, bits = run("GetVideoComponents", context, video=loaded).outputs
    assert images.shape == (3, 8, 16, 3)
    assert (audio, fps, bits) == (None, 12.5, 8)


def test_a_video_is_cut(context: RecordingContext) -> None:
    (built,) = run("CreateVideo", context, images=shades(8), fps=8.0).outputs
    cut = {"start_time": 0.5, "duration": 0.25, "strict_duration": True}
    (part,) = run("Video Slice", context, video=built, **cut).outputs
    assert len(run("GetVideoComponents", context, video=part).outputs[0]) == 2


@pytest.mark.parametrize("codec", ["vp9", "av1"])
def test_a_webm_is_saved(context: RecordingContext, codec: str) -> None:
    images = np.zeros((2, 64, 64, 3), np.float32)
    options = {"filename_prefix": "w", "codec": codec, "fps": 24.0, "crf": 50.0}
    result = run("SaveWEBM", context, images=images, **options)
    assert result.ui is not None
    assert result.ui["animated"] == (True,)
    assert (context.folders.output / "w_00001_.webm").stat().st_size > 0


def test_steps_tell_progress_with_previews(context: RecordingContext) -> None:
    result = run("ComfyfleetSteps", context, steps=3, step_ms=20, previews=True)
    assert [(done, total) for done, total, _ in context.steps] == [(1, 3), (2, 3), (3, 3)]
    assert context.paused_s == pytest.approx(0.06)
    assert result.outputs[0].shape == (1, 64, 64, 3)
    preview = context.steps[0][2]
    assert preview is not None
    with PIL.Image.open(io.BytesIO(preview)) as shown:
        assert (shown.format, shown.size) == ("JPEG", (64, 64))


def test_steps_pass_an_image_through(context: RecordingContext) -> None:
    image = np.zeros((1, 600, 1200, 4), np.float32)
    result = run("ComfyfleetSteps", context, steps=1, step_ms=0, previews=True, image=image)
    assert result.outputs[0] is image
    run("ComfyfleetSteps", context, steps=1, step_ms=0, previews=False)
    assert context.steps[-1] == (1, 1, None)


@pytest.mark.parametrize(
    ("name", "key"),
    [("a.png", "images"), ("a.mp4", "images"), ("a.mp3", "audio"), ("a.xyz", "files")],
)
def test_a_file_is_passed_through_byte_by_byte(
    context: RecordingContext, name: str, key: str
) -> None:
    (context.folders.input / name).write_bytes(b"any bytes")
    result = run("ComfyfleetPassFile", context, file=name, filename_prefix="sub/x")
    suffix = Path(name).suffix
    assert result.outputs == (f"sub/x_00001_{suffix} [output]",)
    assert result.ui is not None
    (saved,) = result.ui[key]
    assert (context.folders.output / "sub" / saved["filename"]).read_bytes() == b"any bytes"
    assert ("animated" in result.ui) is (name == "a.mp4")


def test_a_folder_can_not_be_passed_through(context: RecordingContext) -> None:
    with pytest.raises(NodeFailed, match="can't be copied"):
        run("ComfyfleetPassFile", context, file="", filename_prefix="x")


def test_a_passed_file_is_known_by_size_and_time(context: RecordingContext) -> None:
    path = context.folders.input / "a.bin"
    path.write_bytes(b"1")
    fingerprint = NODES["ComfyfleetPassFile"].fingerprint
    assert fingerprint
    first = fingerprint(context.folders, {"file": "a.bin"})
    path.write_bytes(b"22")
    assert fingerprint(context.folders, {"file": "a.bin"}) != first


def test_failing_on_demand_waits_and_tells_its_message(context: RecordingContext) -> None:
    with pytest.raises(NodeFailed, match="out of luck"):
        run("ComfyfleetFail", context, fail=True, message="out of luck", after_ms=50)
    assert context.paused_s == pytest.approx(0.05)
    passed = run("ComfyfleetFail", context, fail=False, message="", after_ms=0, value="x")
    assert passed.outputs == ("x",)


def test_equal_nodes_run_once(context: RecordingContext) -> None:
    empty = {"width": 2, "height": 2, "batch_size": 1, "color": 0}
    save = {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}}
    prompt = {"1": {"class_type": "EmptyImage", "inputs": empty}, "2": save, "3": save}
    history = PromptRun(prompt, context).history()
    assert history["2"] == history["3"]
    assert len(list(context.folders.output.iterdir())) == 1
