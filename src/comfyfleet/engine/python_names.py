"""What the function behind a node is called in ComfyUI: it shows up in errors of a wrong call."""

from collections.abc import Mapping

from comfyfleet.engine.node import NodeType

# Only those that are not `<node type>.execute`.
NAMES: Mapping[str, str] = {
    "EmptyImage": "EmptyImage.generate",
    "ImageBatch": "ImageBatch.batch",
    "ImageInvert": "ImageInvert.invert",
    "ImagePadForOutpaint": "ImagePadForOutpaint.expand_image",
    "ImageScale": "ImageScale.upscale",
    "ImageScaleBy": "ImageScaleBy.upscale",
    "LoadImage": "LoadImage.load_image",
    "LoadImageMask": "LoadImageMask.load_image",
    "PreviewAny": "PreviewAny.main",
    "PreviewImage": "SaveImage.save_images",
    "SaveImage": "SaveImage.save_images",
    "SaveImageWebsocket": "SaveImageWebsocket.save_images",
    "ComfyMathExpression": "MathExpressionNode.execute",
    "ComfySwitchNode": "SwitchNode.execute",
    "ImageBlend": "Blend.execute",
    "ImageBlur": "Blur.execute",
    "ImageQuantize": "Quantize.execute",
    "ImageSharpen": "Sharpen.execute",
    "PrimitiveBoolean": "Boolean.execute",
    "PrimitiveFloat": "Float.execute",
    "PrimitiveInt": "Int.execute",
    "PrimitiveString": "String.execute",
    "PrimitiveStringMultiline": "StringMultiline.execute",
    "Video Slice": "VideoSlice.execute",
}


def python_name(node_type: NodeType) -> str:
    return NAMES.get(node_type.name, f"{node_type.name}.execute")
