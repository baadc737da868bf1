"""What the JavaScript of widely used node packs does to the values of their own nodes.

Only what shows in a prompt, and only for packs that a good part of saved workflows use.
"""

from collections.abc import Mapping
from typing import Any

from comfyfleet.workflow.nodetypes import NodeType, widgets_of_spec
from comfyfleet.workflow.specs import input_spec
from comfyfleet.workflow.widgettypes import Widget

# VideoHelperSuite saves values by name. What it saved as a list in its early days, by position:
_OLD_LISTS: Mapping[str, tuple[str | None, ...]] = {
    "VHS_LoadImages": (
        "directory", None, "image_load_cap", "skip_first_images", "select_every_nth",
    ),
    "VHS_LoadImagesPath": (
        "directory", "image_load_cap", "skip_first_images", "select_every_nth",
    ),
    "VHS_VideoCombine": (
        "frame_rate", "loop_count", "filename_prefix", "format", "pingpong", "save_image",
    ),
    "VHS_LoadVideo": (
        "video", "force_rate", "force_size", "frame_load_cap", "skip_first_frames",
        "select_every_nth",
    ),
    "VHS_LoadVideoPath": (
        "video", "force_rate", "force_size", "frame_load_cap", "skip_first_frames",
        "select_every_nth",
    ),
}  # fmt: skip
_OLD_NAMES = {"VHS_VideoCombine": {"save_output": "save_image"}}


def named_values(node_type: NodeType, saved: Any) -> dict[str, Any] | None:
    """The values of a VideoHelperSuite node by name, or None where they are a plain list."""
    if isinstance(saved, dict):
        return _with_sizes(saved)
    names = _OLD_LISTS.get(node_type.name)
    if names is None or not isinstance(saved, list) or len(saved) < len(names):
        return None
    pairs = zip(names, saved, strict=False)
    return _with_sizes({name: value for name, value in pairs if name is not None})


def deal_named(
    node_type: NodeType, named: Mapping[str, Any]
) -> tuple[tuple[Widget, ...], dict[str, Any]]:
    """Each widget takes the value of its name; a format brings widgets of its own behind it."""
    widgets: list[Widget] = []
    values: dict[str, Any] = {}
    pending = list(reversed(node_type.widgets))
    old_names = _OLD_NAMES.get(node_type.name, {})
    while pending:
        widget = pending.pop()
        widgets.append(widget)
        if not widget.is_widget:
            continue
        source = widget.name if widget.name in named else old_names.get(widget.name, widget.name)
        values[widget.name] = _in_range(named.get(source, widget.default), widget.options)
        if widget.name == "format":
            pending.extend(reversed(_format_widgets(widget, values["format"])))
    return tuple(widgets), values


def _in_range(value: Any, options: Mapping[str, Any]) -> Any:
    """This pack's number widgets keep their range even for saved values."""
    least, most = options.get("min"), options.get("max")
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    if isinstance(least, int | float) and value < least:
        return least
    return most if isinstance(most, int | float) and value > most else value


def _format_widgets(widget: Widget, chosen: Any) -> list[Widget]:
    formats = widget.options.get("formats")
    entries = formats.get(chosen) if isinstance(formats, dict) and isinstance(chosen, str) else None
    return [
        made
        for entry in (entries if isinstance(entries, list) else ())
        for made in widgets_of_spec(input_spec(str(entry[0]), entry[1:]))
    ]


def _with_sizes(named: Mapping[str, Any]) -> dict[str, Any]:
    """`force_size` was replaced by a width and a height."""
    values = dict(named)
    size = values.get("force_size")
    if not isinstance(size, str):
        return values
    if "x" in size:
        width, _, height = size.partition("x")
        values["custom_width"] = _leading_number(width)
        values["custom_height"] = _leading_number(height)
    if size in ("Disabled", "Custom Height"):
        values["custom_width"] = 0
    if size in ("Disabled", "Custom Width"):
        values["custom_height"] = 0
    return values


def _leading_number(text: str) -> int | None:
    if text == "?":
        return 0
    digits = text[: len(text) - len(text.lstrip("0123456789"))]
    return int(digits) if digits else None


def listed_loras(
    node_type: NodeType, saved: Any, properties: Mapping[str, Any]
) -> tuple[tuple[Widget, ...], dict[str, Any]]:
    """The widgets of rgthree's Power Lora Loader: a header, a line for each LoRA, a button."""
    separate = properties.get("Show Strengths") == "Separate Model & Clip"
    values: dict[str, Any] = {_LORA_HEADER: {"type": _LORA_HEADER}}
    for entry in saved if isinstance(saved, list) else ():
        if isinstance(entry, dict) and "lora" in entry:
            lora = {key: value for key, value in entry.items() if key != "strengthTwo"}
            if separate:
                second = entry.get("strengthTwo")
                lora["strengthTwo"] = 1 if second is None else second
            values[f"lora_{len(values)}"] = lora
    values[_LORA_BUTTON] = ""
    made = [Widget(name, "lora", socket=False) for name in values]
    return (*node_type.widgets, *made), values


_LORA_HEADER = "PowerLoraLoaderHeaderWidget"
_LORA_BUTTON = "➕ Add Lora"


def compared_images(saved: Any) -> dict[str, Any]:
    """What rgthree's Image Comparer sends: the pictures it showed last, two of them selected."""
    listed = saved if isinstance(saved, list) else []
    if isinstance(saved, dict) and isinstance(saved.get("images"), list):
        listed = saved["images"]
    images = [
        dict(image) if isinstance(image, dict)
        else {"url": image, "name": "B" if index else "A", "selected": True}
        for index, image in enumerate(listed)
    ]  # fmt: skip
    if len(images) > 2 and not all(_has_name(images, letter) for letter in "AB"):
        images = images[:2]
    for image in images:
        if sum(bool(other.get("selected")) for other in images) < min(2, len(images)):
            image["selected"] = True
    return {"images": [{k: v for k, v in image.items() if k != "img"} for image in images]}


def _has_name(images: list[dict[str, Any]], letter: str) -> bool:
    return any(str(image.get("name", "")).startswith(letter) for image in images)
