"""Nodes for masks, alpha and batches."""

from typing import Any

import numpy as np
import pytest
from tests.unit.engine.node_runs import RecordingContext, folders_in, run, value

from comfyfleet.engine.image_math import Image, Mask
from comfyfleet.errors import LimitExceeded, NodeFailed


def mask_row(*values: float) -> Mask:
    return np.array([[values]], np.float32)


def line(mask: Mask) -> list[float]:
    return [round(float(v), 4) for v in mask[0, 0]]


def solid(value_: float, width: int, height: int, channels: int = 3) -> Image:
    return np.full((1, height, width, channels), value_, np.float32)


def test_a_solid_mask_has_one_value() -> None:
    mask = value("SolidMask", value=0.5, width=3, height=2)
    assert mask.shape == (1, 2, 3)
    assert (mask == 0.5).all()
    with pytest.raises(NodeFailed):
        value("SolidMask", value=0.5, width=-3, height=2)


def test_masks_are_inverted_and_cropped() -> None:
    mask = mask_row(0.25, 0.5, 1)
    assert line(value("InvertMask", mask=mask)) == [0.75, 0.5, 0]
    assert line(value("CropMask", mask=mask, x=1, y=0, width=9, height=9)) == [0.5, 1]
    assert value("CropMask", mask=mask[0], x=0, y=0, width=1, height=1).shape == (1, 1, 1)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("multiply", [0.5, 0.25, 1]),
        ("add", [0.5, 1, 1]),
        ("subtract", [0.5, 0, 0]),
        ("and", [0.5, 0, 1]),
        ("or", [0.5, 0, 1]),
        ("xor", [0.5, 0, 0]),
    ],
)
def test_masks_are_combined_where_they_overlap(operation: str, expected: list[float]) -> None:
    combined = value(
        "MaskComposite",
        destination=mask_row(0.5, 0.5, 1),
        source=mask_row(0.5, 1, 9),
        x=1,
        y=0,
        operation=operation,
    )
    assert line(combined) == expected


def test_a_mask_is_feathered_from_each_side() -> None:
    ones = np.ones((1, 1, 4), np.float32)
    context = {"left": 2, "top": 0, "right": 4, "bottom": 0}
    assert line(value("FeatherMask", mask=ones, **context)) == [0.5, 0.75, 0.5, 0.25]
    context = {"left": 0, "top": 0, "right": 0, "bottom": 9}
    assert value("FeatherMask", mask=np.ones((1, 2, 1), np.float32), **context).tolist() == [
        [[1], [0.5]]
    ]


def test_a_mask_grows_and_shrinks() -> None:
    mask = mask_row(0, 0, 1, 0, 0)
    assert line(value("GrowMask", mask=mask, expand=1, tapered_corners=True)) == [0, 1, 1, 1, 0]
    assert line(value("GrowMask", mask=mask, expand=-1, tapered_corners=True)) == [0] * 5


def test_a_threshold_is_exceeded_strictly() -> None:
    mask = mask_row(0.5, 0.51)
    assert line(value("ThresholdMask", mask=mask, value=0.5)) == [0, 1]


def test_masks_become_images_and_back() -> None:
    image = value("MaskToImage", mask=mask_row(0.25, 0.5))
    assert image.shape == (1, 1, 2, 3)
    assert line(value("ImageToMask", image=image, channel="green")) == [0.25, 0.5]
    with pytest.raises(NodeFailed, match="alpha"):
        value("ImageToMask", image=image, channel="alpha")


def test_a_colour_becomes_a_mask_by_rounding() -> None:
    image = np.array([[[[254.6 / 255, 0, 0], [0, 1, 0]]]], np.float32)
    assert line(value("ImageColorToMask", image=image, color=0xFF0000)) == [1, 0]


def test_a_preview_of_a_mask_is_temporary_and_grey(tmp_path: Any) -> None:
    context = RecordingContext(folders_in(tmp_path))
    result = run("MaskPreview", context, mask=mask_row(0, 1))
    assert result.ui is not None
    assert [saved["type"] for saved in result.ui["images"]] == ["temp"]
    assert result.ui["animated"] == (False,)


def composite(source: Image, x: int, mask: Mask | None = None, **more: Any) -> list[float]:
    inputs = {"x": x, "y": 0, "resize_source": False} | more
    given = {} if mask is None else {"mask": mask}
    destination = solid(0, 4, 1)
    result = value(
        "ImageCompositeMasked", destination=destination, source=source, **inputs, **given
    )
    assert (destination == 0).all()
    return [round(float(v), 4) for v in result[0, 0, :, 0]]


def test_what_lies_outside_the_destination_is_cut() -> None:
    assert composite(solid(1, 2, 1), 1) == [0, 1, 1, 0]
    assert composite(solid(1, 3, 5), 3) == [0, 0, 0, 1]
    assert composite(solid(1, 2, 1), 99) == [0, 0, 0, 0]
    assert composite(solid(1, 1, 1), 0, resize_source=True) == [1, 1, 1, 1]


def test_a_mask_is_scaled_to_the_source() -> None:
    assert composite(solid(1, 2, 1), 0, mask_row(0.25)) == [0.25, 0.25, 0, 0]
    assert composite(solid(1, 4, 1), 0, mask_row(0, 1)) == [0, 0.25, 0.75, 1]


def test_alpha_is_the_inverse_of_a_mask() -> None:
    joined = value("JoinImageWithAlpha", image=solid(0.5, 2, 1), alpha=mask_row(0.25))
    assert joined[0, 0, 0].tolist() == [0.5, 0.5, 0.5, 0.75]
    image, mask = run("SplitImageWithAlpha", image=joined).outputs
    assert image.shape[-1] == 3
    assert line(mask) == [0.25, 0.25]
    _, opaque = run("SplitImageWithAlpha", image=image).outputs
    assert line(opaque) == [0, 0]


def test_one_mask_serves_a_whole_batch() -> None:
    batch = np.concatenate([solid(0.1, 1, 1), solid(0.2, 1, 1), solid(0.3, 1, 1)])
    assert value("JoinImageWithAlpha", image=batch, alpha=mask_row(0)).shape[0] == 3


def test_an_empty_image_has_the_colour_of_a_number() -> None:
    image = value("EmptyImage", width=2, height=1, batch_size=3, color=0xFF8000)
    assert image.shape == (3, 1, 2, 3)
    assert (image[0, 0, 0] * 255).tolist() == pytest.approx([255, 128, 0])
    with pytest.raises(NodeFailed):
        value("EmptyImage", width=-5, height=1, batch_size=1, color=0)


def test_no_prompt_can_fill_the_memory() -> None:
    with pytest.raises(LimitExceeded):
        value("EmptyImage", width=16384, height=16384, batch_size=4096, color=0)
    with pytest.raises(LimitExceeded):
        value("RepeatImageBatch", image=solid(0, 1024, 1024), amount=4096)


def test_the_size_is_shown_on_the_node(tmp_path: Any) -> None:
    context = RecordingContext(folders_in(tmp_path))
    assert run("GetImageSize", context, image=solid(0, 16, 8)).outputs == (16, 8, 1)
    assert context.texts == ["width: 16, height: 8\n batch size: 1"]


def test_a_batch_takes_the_size_of_its_first_image() -> None:
    for batch in (
        value("ImageBatch", image1=solid(0, 2, 1), image2=solid(1, 4, 4, 4)),
        value(
            "BatchImagesNode",
            **{"images.image0": solid(0, 2, 1), "images.image1": solid(1, 4, 4, 4)},
        ),
    ):
        assert batch.shape == (2, 1, 2, 4)
        assert batch[0, 0, 0].tolist() == [0, 0, 0, 1]


def test_a_batch_follows_the_numbers_of_its_slots() -> None:
    numbered = {f"images.image{n}": solid(n / 100, 1, 1) for n in (10, 2, 0)}
    batch = value("BatchImagesNode", **numbered)
    assert np.round(batch[:, 0, 0, 0] * 100).tolist() == [0, 2, 10]


def test_a_batch_is_repeated_as_a_whole() -> None:
    batch = np.concatenate([solid(0, 1, 1), solid(1, 1, 1)])
    repeated = value("RepeatImageBatch", image=batch, amount=2)
    assert repeated[:, 0, 0, 0].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("index", "length", "expected"),
    [(0, 1, [0]), (1, 9, [1, 2]), (-1, 1, [2]), (-9, 2, [0, 1]), (9, 1, [2])],
)
def test_images_are_picked_from_a_batch(index: int, length: int, expected: list[int]) -> None:
    batch = np.arange(3, dtype=np.float32).reshape(3, 1, 1, 1).repeat(3, axis=-1)
    picked = value("ImageFromBatch", image=batch, batch_index=index, length=length)
    assert picked[:, 0, 0, 0].tolist() == expected
