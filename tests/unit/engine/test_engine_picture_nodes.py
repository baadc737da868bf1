"""Nodes that change pictures, each with a picture so small that the answer can be told by hand."""

from typing import Any

import numpy as np
import pytest
from tests.unit.engine.node_runs import RecordingContext, folders_in, run, value

from comfyfleet.engine.image_math import Image, to_bytes
from comfyfleet.errors import InvalidInput, NodeFailed


def row(*values: float) -> Image:
    """One line of grey pixels."""
    return np.array(values, np.float32).reshape(1, 1, -1, 1).repeat(3, axis=-1)


def shape(image: Image) -> tuple[int, int]:
    return image.shape[2], image.shape[1]


def grey(image: Image) -> list[Any]:
    """The red channel of the first image, without its lines if there is one only."""
    lines = np.round(image[0, ..., 0].astype(float), 4).tolist()
    return list(lines[0]) if len(lines) == 1 else list(lines)


BLANK = np.zeros((1, 23, 37, 3), np.float32)
TALL = np.zeros((1, 45, 20, 3), np.float32)


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [(50, 40, (50, 40)), (0, 46, (74, 46)), (74, 0, (74, 46)), (0, 0, (37, 23)), (1, 0, (1, 1))],
)
def test_image_scale_fills_in_what_is_zero(
    width: int, height: int, expected: tuple[int, int]
) -> None:
    scaled = value(
        "ImageScale",
        image=BLANK,
        upscale_method="area",
        width=width,
        height=height,
        crop="disabled",
    )
    assert shape(scaled) == expected


@pytest.mark.parametrize(("factor", "expected"), [(0.5, (18, 12)), (1.5, (56, 34))])
def test_image_scale_by_rounds_half_to_even(factor: float, expected: tuple[int, int]) -> None:
    scaled = value("ImageScaleBy", image=BLANK, upscale_method="area", scale_by=factor)
    assert shape(scaled) == expected


@pytest.mark.parametrize(("steps", "expected"), [(1, (68, 154)), (8, (72, 152))])
def test_total_pixels_count_in_multiples_of_1024_squared(
    steps: int, expected: tuple[int, int]
) -> None:
    scaled = value(
        "ImageScaleToTotalPixels",
        image=TALL,
        upscale_method="nearest-exact",
        megapixels=0.01,
        resolution_steps=steps,
    )
    assert shape(scaled) == expected


@pytest.mark.parametrize(
    ("image", "expected"),
    [(BLANK, (25, 16)), (TALL, (11, 25)), (BLANK[:, :, :23], (25, 25))],
)
def test_max_dimension_is_that_of_the_longer_side(image: Image, expected: tuple[int, int]) -> None:
    scaled = value(
        "ImageScaleToMaxDimension", image=image, upscale_method="bilinear", largest_size=25
    )
    assert shape(scaled) == expected


def test_resize_and_pad_centers_the_picture() -> None:
    def fitted(width: int, height: int) -> Image:
        padded: Image = value(
            "ResizeAndPadImage",
            image=row(0, 0),
            target_width=width,
            target_height=height,
            padding_color="white",
            interpolation="area",
        )
        return padded

    assert grey(fitted(2, 3)) == [[1, 1], [0, 0], [1, 1]]
    # Half a line is no line: only the padding is left.
    assert grey(fitted(1, 1)) == [1]


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("scale dimensions", {"width": 20, "height": 0, "crop": "center"}, (20, 12)),
        ("scale by multiplier", {"multiplier": 2.0}, (74, 46)),
        ("scale longer dimension", {"longer_size": 74}, (74, 46)),
        ("scale shorter dimension", {"shorter_size": 46}, (74, 46)),
        ("scale width", {"width": 74}, (74, 46)),
        ("scale height", {"height": 46}, (74, 46)),
        ("scale total pixels", {"megapixels": 0.01}, (130, 81)),
        ("match size", {"match": TALL, "crop": "disabled"}, (20, 45)),
        ("match size", {"match": TALL[..., 0], "crop": "center"}, (20, 45)),
        ("scale to multiple", {"multiple": 8}, (32, 16)),
        ("scale to multiple", {"multiple": 64}, (37, 23)),
    ],
)
def test_every_way_to_resize_works_for_images_and_masks(
    kind: str, options: dict[str, Any], expected: tuple[int, int]
) -> None:
    named = {f"resize_type.{name}": given for name, given in options.items()}
    for picture in (BLANK, BLANK[..., 0]):
        resized = value(
            "ResizeImageMaskNode", input=picture, resize_type=kind, scale_method="area", **named
        )
        assert shape(resized) == expected
        assert resized.ndim == picture.ndim


def test_the_shorter_side_of_a_tall_picture_is_its_width() -> None:
    options = {"resize_type.shorter_size": 10, "scale_method": "area"}
    resized = value(
        "ResizeImageMaskNode", input=TALL, resize_type="scale shorter dimension", **options
    )
    assert shape(resized) == (10, 22)


def test_an_unknown_way_to_resize_fails_in_the_node() -> None:
    with pytest.raises(InvalidInput, match="scale to fit"):
        value("ResizeImageMaskNode", input=BLANK, resize_type="scale to fit", scale_method="area")


@pytest.mark.parametrize(
    ("x", "width", "expected"), [(1, 2, [1, 2]), (2, 9, [2, 3]), (9, 5, [3]), (-2, 1, [2])]
)
def test_a_crop_stays_inside_the_picture(
    x: int, width: int, expected: list[int], tmp_path: Any
) -> None:
    region = {"x": x, "y": 0, "width": width, "height": 1}
    image = row(0, 1, 2, 3)
    assert grey(value("ImageCrop", image=image, **region)) == expected
    context = RecordingContext(folders_in(tmp_path))
    result = run("ImageCropV2", context, image=image, crop_region=region)
    assert grey(result.outputs[0]) == expected
    assert result.ui is not None
    assert result.ui["animated"] == (False,)
    assert len(list(context.folders.temp.iterdir())) == 1


def test_a_region_that_says_nothing_is_512_wide(tmp_path: Any) -> None:
    context = RecordingContext(folders_in(tmp_path))
    result = run(
        "ImageCropV2", context, image=np.zeros((1, 600, 600, 3), np.float32), crop_region={}
    )
    assert shape(result.outputs[0]) == (512, 512)


def outpainted(feathering: int, **padding: int) -> tuple[Image, Image]:
    context = {"left": 0, "top": 0, "right": 0, "bottom": 0} | padding
    image = np.ones((2, 5, 5, 3), np.float32)
    padded, mask = run("ImagePadForOutpaint", image=image, feathering=feathering, **context).outputs
    return padded, mask


def test_outpainting_pads_with_grey_and_masks_what_is_new() -> None:
    image, mask = outpainted(0, left=2, bottom=1)
    assert image.shape == (2, 6, 7, 3)
    assert to_bytes(image[1, 0, :3, 0]).tolist() == [127, 127, 255]
    assert mask.shape == (1, 6, 7)
    assert mask[0, 0].tolist() == [1, 1, 0, 0, 0, 0, 0]
    assert mask[0, 5].min() == 1


def test_outpainting_feathers_towards_new_edges_only() -> None:
    _, mask = outpainted(2, left=1)
    assert mask[0, 2].tolist() == [1, 1, 0.25, 0, 0, 0]
    _, unfeathered = outpainted(3, left=1)
    assert unfeathered[0, 2].tolist() == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("rotation", "expected"),
    [
        ("none", [[0, 1], [2, 3]]),
        ("90 degrees", [[2, 0], [3, 1]]),
        ("180 degrees", [[3, 2], [1, 0]]),
        ("270 degrees", [[1, 3], [0, 2]]),
    ],
)
def test_rotation_is_clockwise(rotation: str, expected: list[list[int]]) -> None:
    image = row(0, 1, 2, 3).reshape(1, 2, 2, 3)
    assert grey(value("ImageRotate", image=image, rotation=rotation)) == expected


def test_flipping_is_named_after_the_axis() -> None:
    image = row(0, 1, 2, 3).reshape(1, 2, 2, 3)
    flipped = value("ImageFlip", image=image, flip_method="x-axis: vertically")
    assert grey(flipped) == [[2, 3], [0, 1]]
    flipped = value("ImageFlip", image=image, flip_method="y-axis: horizontally")
    assert grey(flipped) == [[1, 0], [3, 2]]


def stitched(first: Image, second: Image | None, direction: str = "right", **more: Any) -> Image:
    options = {"match_image_size": False, "spacing_width": 0, "spacing_color": "white"} | more
    given = {} if second is None else {"image2": second}
    joined: Image = value("ImageStitch", image1=first, direction=direction, **options, **given)
    return joined


def test_stitching_follows_the_direction() -> None:
    a, b = row(0.0), row(0.5)
    assert grey(stitched(a, b, "right")) == [0, 0.5]
    assert grey(stitched(a, b, "left")) == [0.5, 0]
    assert grey(stitched(a, b, "down")) == [[0], [0.5]]
    assert grey(stitched(a, b, "up")) == [[0.5], [0]]
    assert stitched(a, None) is a


def test_stitching_makes_the_spacing_even_and_opaque() -> None:
    rgba = np.zeros((1, 1, 1, 4), np.float32)
    joined = stitched(row(0.0), rgba, spacing_width=1, spacing_color="red")
    assert joined[0, 0].tolist() == [[0, 0, 0, 1], [1, 0, 0, 1], [1, 0, 0, 1], [0, 0, 0, 0]]


def test_stitching_pads_the_smaller_picture_or_scales_it() -> None:
    tall = np.zeros((1, 3, 1, 3), np.float32)
    assert grey(stitched(tall, row(0.5))) == [[0, 1], [0, 0.5], [0, 1]]
    assert grey(stitched(tall, row(0.5), spacing_color="red"))[0] == [0, 0]
    assert shape(stitched(tall, row(0.5, 0.5), match_image_size=True)) == (7, 3)
    assert shape(stitched(row(0, 0), row(0.5), "down", match_image_size=True)) == (2, 3)


def test_stitching_repeats_the_last_picture_of_the_shorter_batch() -> None:
    batch = np.concatenate([row(0.1), row(0.2), row(0.3)])
    joined = stitched(batch[:2], batch)
    assert np.round(joined[:, 0, 0, 0], 2).tolist() == pytest.approx([0.1, 0.2, 0.2])
    with pytest.raises(NodeFailed, match="empty batch"):
        stitched(batch[:0], batch)


def test_inverting_is_one_off_when_saved() -> None:
    inverted = to_bytes(value("ImageInvert", image=np.arange(256, dtype=np.float32) / 255))
    wanted = 255 - np.arange(256)
    assert (wanted - inverted).min() == 0
    assert (wanted - inverted).max() == 1


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("normal", [0.75, 0.25]),
        ("multiply", [0.375, 0.125]),
        ("screen", [0.875, 0.625]),
        ("overlay", [0.75, 0.25]),
        ("soft_light", [0.6036, 0.375]),
        ("difference", [0.0, 0.25]),
    ],
)
def test_blending_modes(mode: str, expected: list[float]) -> None:
    blended = value(
        "ImageBlend",
        image1=row(0.5, 0.5),
        image2=row(0.75, 0.25),
        blend_factor=1.0,
        blend_mode=mode,
    )
    assert grey(blended) == expected


def test_blending_fits_the_second_picture_to_the_first() -> None:
    rgba = np.zeros((1, 4, 4, 4), np.float32)
    options = {"blend_factor": 0.5, "blend_mode": "normal"}
    assert value("ImageBlend", image1=row(0, 1), image2=rgba, **options).shape == (1, 1, 2, 3)
    opaque = value("ImageBlend", image1=rgba, image2=row(0, 1), **options)
    assert opaque.shape == (1, 4, 4, 4)
    assert opaque[0, 0, 0, 3] == 0.5


def test_blur_and_sharpen_leave_a_flat_picture_alone() -> None:
    flat = np.full((1, 4, 4, 3), 0.25, np.float32)
    assert value("ImageBlur", image=flat, blur_radius=2, sigma=1.0) == pytest.approx(0.25)
    sharp = {"sharpen_radius": 2, "sigma": 1.0, "alpha": 1.0}
    assert value("ImageSharpen", image=flat, **sharp) == pytest.approx(0.25)
    assert value("ImageBlur", image=flat, blur_radius=0, sigma=1.0) is flat
    assert value("ImageSharpen", image=flat, **(sharp | {"sharpen_radius": 0})) is flat


def test_sharpening_pushes_edges_apart_and_clamps_them() -> None:
    edge = np.repeat(row(0.25, 0.25, 0.75, 0.75), 3, axis=1)
    sharp = value("ImageSharpen", image=edge, sharpen_radius=1, sigma=1.0, alpha=1.0)
    assert grey(sharp)[1] == [0.25, 0, 1, 0.75]


@pytest.mark.parametrize("dither", ["none", "floyd-steinberg", "bayer-2", "bayer-16"])
def test_quantizing_leaves_no_more_colours_than_asked(dither: str) -> None:
    ramp = np.linspace(0, 1, 64, dtype=np.float32).reshape(1, 8, 8, 1).repeat(3, axis=-1)
    quantized = value("ImageQuantize", image=ramp, colors=4, dither=dither)
    assert len(np.unique(quantized[..., 0])) <= 4


def test_only_three_channels_can_be_quantized() -> None:
    with pytest.raises(NodeFailed, match="three channels"):
        value("ImageQuantize", image=np.zeros((1, 2, 2, 4), np.float32), colors=2, dither="none")


def test_noise_is_the_same_for_a_seed_and_stays_in_range() -> None:
    first, second = (
        value("ImageAddNoise", image=BLANK + 0.5, seed=9, strength=1.0) for _ in range(2)
    )
    assert (first == second).all()
    assert 0 <= first.min() < first.max() <= 1
    assert (value("ImageAddNoise", image=BLANK, seed=9, strength=0.0) == 0).all()


def test_brightness_and_contrast_are_clamped() -> None:
    image = row(0.25, 0.75)
    assert grey(value("AdjustBrightness", images=image, factor=2.0)) == [0.5, 1]
    assert grey(value("AdjustContrast", images=image, factor=0.0)) == [0.5, 0.5]
    assert grey(value("AdjustContrast", images=image, factor=2.0)) == [0, 1]
