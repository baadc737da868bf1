"""Scripts for ComfyScript whose arguments are positional, so that they depend on the order of a node's inputs."""

import hashlib
import io
import os
from typing import Any

import pytest
from comfy_script.runtime import Workflow, load


@pytest.fixture(scope="session", autouse=True)
def _nodes() -> None:
    load(os.environ["COMFYSCRIPT_SERVER"])


def digests(pictures: Any) -> list[str]:
    found = []
    for picture in pictures.wait():
        data = io.BytesIO(picture.tobytes())
        found.append(f"{picture.size} {hashlib.sha256(data.getvalue()).hexdigest()}")
    return found


def test_numbers_land_in_their_inputs(record_property: Any) -> None:
    from comfy_script.runtime.nodes import EmptyImage, SaveImage

    with Workflow(wait=True):
        pictures = SaveImage(EmptyImage(2, 3, 4, 5), "positions")
    record_property("pictures", digests(pictures))


def test_a_chain_of_positional_arguments(record_property: Any) -> None:
    from comfy_script.runtime.nodes import EmptyImage, ImageBlur, ImageScale, SaveImage

    with Workflow(wait=True):
        image = ImageScale(EmptyImage(8, 16, 1, 4242), "nearest-exact", 24, 40, "disabled")
        pictures = SaveImage(ImageBlur(image, 2, 1.0), "chain")
    record_property("pictures", digests(pictures))
