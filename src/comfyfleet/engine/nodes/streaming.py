"""Nodes whose result goes over the websocket instead of into a file."""

import math
from io import BytesIO

from comfyfleet.engine.declare import Interface, bare, node
from comfyfleet.engine.files import to_pillow
from comfyfleet.engine.node import Context, Folders, Inputs, Result
from comfyfleet.engine.values import Image

PNG_COMPRESSION = 1


def _never_the_same(folders: Folders, inputs: Inputs) -> float:
    """Each run must send its pictures, so none may be taken from the cache."""
    return math.nan


@node(
    Interface(
        "SaveImageWebsocket",
        "Save Image (Websocket)",
        "custom_nodes.websocket_image_save",
        "image",
        inputs={"images": bare("IMAGE")},
        outputs=(),
        output_node=True,
        classic=True,
    ),
    fingerprint=_never_the_same,
)
def save_image_websocket(context: Context, images: Image) -> Result:
    """Each picture as the preview of a step; the steps count from nought."""
    for index, picture in enumerate(to_pillow(images)):
        file = BytesIO()
        picture.save(file, "PNG", compress_level=PNG_COMPRESSION)
        context.progress(index, len(images), file.getvalue())
    return Result()


NODES = (save_image_websocket,)
