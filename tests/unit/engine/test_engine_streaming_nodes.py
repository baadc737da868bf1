"""Nodes that stream their result, and nodes that only name models."""

from io import BytesIO
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from tests.unit.engine.node_runs import NODES, RecordingContext, folders_in, run, value

from comfyfleet.errors import NodeFailed


@pytest.fixture
def context(tmp_path: Path) -> RecordingContext:
    return RecordingContext(folders_in(tmp_path))


def test_pictures_are_sent_as_previews_of_steps_from_nought(context: RecordingContext) -> None:
    images = np.ones((2, 4, 6, 3), np.float32)
    assert run("SaveImageWebsocket", context, images=images).ui is None
    assert [(done, total) for done, total, _ in context.steps] == [(0, 2), (1, 2)]
    assert context.steps[0][2] is not None
    with PIL.Image.open(BytesIO(context.steps[0][2])) as sent:
        assert (sent.format, sent.size, sent.getpixel((0, 0))) == ("PNG", (6, 4), (255, 255, 255))


def test_streamed_pictures_are_never_taken_from_the_cache(context: RecordingContext) -> None:
    fingerprint = NODES["SaveImageWebsocket"].fingerprint
    assert fingerprint is not None
    once = fingerprint(context.folders, {})
    assert once != once


def test_a_sampler_is_no_more_than_its_name() -> None:
    assert value("KSamplerSelect", sampler_name="euler") == "euler"


def test_there_is_no_model_to_load(context: RecordingContext) -> None:
    with pytest.raises(NodeFailed, match="the built-in engine has no models"):
        run("CheckpointLoaderSimple", context, ckpt_name="sd15.safetensors")
