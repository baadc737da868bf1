"""Assigns the saved `widgets_values` to a node's widgets, strictly in order. Some popular packs
save values differently. Their nodes are read according to the packs' JavaScript."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from comfyfleet.errors import LimitExceeded
from comfyfleet.workflow.model import DEFAULT_LIMITS, Limits, Node, new_tuple
from comfyfleet.workflow.node_behaviours import CUSTOM_COMBO, OLD_SAMPLER_PREFIX, SAMPLER_CLASSES
from comfyfleet.workflow.node_inputs import LOADING, Widget, input_spec
from comfyfleet.workflow.object_info import DYNAMIC_GROUP, NodeType, widgets_of_spec

# VideoHelperSuite saves values by name. Early versions saved a list, with these names by position.
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
    """Returns the values of a VideoHelperSuite node by name, or None if they are a plain list."""
    if isinstance(saved, dict):
        return _with_sizes(saved)
    names = _OLD_LISTS.get(node_type.name)
    if names is None or not isinstance(saved, list) or len(saved) < len(names):
        return None
    pairs = zip(names, saved, strict=False)
    return _with_sizes({name: value for name, value in pairs if name is not None})


def assign_named_values(
    node_type: NodeType, named: Mapping[str, Any]
) -> tuple[tuple[Widget, ...], dict[str, Any]]:
    """Assigns values to widgets by name. A chosen format adds its own widgets after the format
    widget."""
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
    """Clamps a number. The widgets of this pack enforce their range even for saved values."""
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
        format_widget
        for entry in (entries if isinstance(entries, list) else ())
        for format_widget in widgets_of_spec(input_spec(str(entry[0]), entry[1:]))
    ]


def _with_sizes(named: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the old `force_size` to a width and a height."""
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
    """Returns the widgets and values of rgthree's Power Lora Loader: a header, one line per LoRA,
    and a button."""
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
    lora_widgets = [Widget(name, "lora", socket=False) for name in values]
    return (*node_type.widgets, *lora_widgets), values


_LORA_HEADER = "PowerLoraLoaderHeaderWidget"
_LORA_BUTTON = "➕ Add Lora"


def compared_images(saved: Any) -> dict[str, Any]:
    """Returns the value that rgthree's Image Comparer sends: the images that it showed last, with
    two of them selected."""
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


class WidgetValues(NamedTuple):
    """The widgets that a node has with its values, and the value of each widget."""

    widgets: tuple[Widget, ...]
    values: dict[str, Any]
    slots: int  # number of entries in widgets_values that the widgets use


def assign_widget_values(
    node_type: NodeType, node: Node, *, limits: Limits = DEFAULT_LIMITS
) -> WidgetValues:
    saved, overrides = node.values, node.overrides
    if node_type.is_plain and isinstance(saved, list) and None not in saved and not overrides:
        values = dict(zip(node_type.stored, saved, strict=False))
        if len(saved) < len(node_type.stored):
            values = {**node_type.defaults, **values}
        if node_type.name in SAMPLER_CLASSES:
            _cut_old_prefix(values)
        return new_tuple(WidgetValues, (node_type.widgets, values, len(node_type.stored)))
    positional = positional_values(node_type, saved)
    special = _assign_special(node_type, node, positional)
    if special is not None:
        return special
    widgets: list[Widget] = []
    values = {}
    position = _assign(list(reversed(node_type.widgets)), positional, widgets, values, limits)
    if node_type.name in SAMPLER_CLASSES:
        _cut_old_prefix(values)
    if overrides:
        values.update((name, overrides[name]) for name in overrides if name in values)
    return WidgetValues(tuple(widgets), values, position)


def _assign_special(
    node_type: NodeType, node: Node, positional: Sequence[Any]
) -> WidgetValues | None:
    """Assigns the values of classes with special rules. Returns None for other classes."""
    if node_type.name == CUSTOM_COMBO:
        return _assign_custom_combo(node_type, positional)
    behaviour = node_type.behaviour
    if behaviour is None:
        return None
    if behaviour.lists_loras:
        widgets, values = listed_loras(node_type, node.values, node.properties)
        return WidgetValues(widgets, values, len(positional))
    named = named_values(node_type, positional or node.values) if behaviour.named_values else None
    return (
        WidgetValues(*assign_named_values(node_type, named), len(named))
        if named is not None
        else None
    )


def _assign(
    pending: list[Widget],
    positional: Sequence[Any],
    widgets: list[Widget],
    values: dict[str, Any],
    limits: Limits,
) -> int:
    position = 0
    available = len(positional)
    while pending:
        widget = pending.pop()
        widgets.append(widget)
        if not widget.is_widget:
            continue
        value = widget.default
        if widget.stored:
            if position < available and widget.kind != "viewport":
                value = positional[position]
            position += 1
        assigned = value is not None
        if widget.kind == "comparer":
            value = compared_images(value)
        if widget.kind == "remote":
            value = _listed(value, widget)
        elif value is None and widget.choices:
            value = widget.choices[0]
        elif value is None and widget.kind == "multiselect":
            value = ""
        values[widget.name] = value
        if widget.children is not None:
            pending.extend(reversed(_children(widget, value, assigned=assigned, limits=limits)))
    return position


def _listed(value: Any, widget: Widget) -> Any:
    """Replaces a value with the first choice if a remote list doesn't contain it."""
    choices = widget.choices or ()
    return value if value in choices else choices[0] if choices else LOADING


def _children(widget: Widget, value: Any, *, assigned: bool, limits: Limits) -> list[Widget]:
    """Returns the widgets that a choice or number adds. If it had no saved value, its children
    don't consume saved values either, because the editor replaces a null choice with the first one
    only after assigning all values."""
    if isinstance(value, int | float) and value > limits.dynamic_rows_max:
        raise LimitExceeded(f"{widget.name}: {value} rows; the limit is {limits.dynamic_rows_max}")
    children = widget.children(value) if widget.children else []
    return children if assigned else [child._replace(stored=False) for child in children]


def rebranched(
    widgets: Sequence[Widget], values: Mapping[str, Any], choice: Widget
) -> tuple[tuple[Widget, ...], dict[str, Any]]:
    """Returns the widgets and values of a node after a choice changed. The widgets of its branch
    are recreated with their defaults."""
    prefix = f"{choice.name}."
    before = [widget for widget in widgets if not widget.name.startswith(prefix)]
    place = before.index(choice) + 1
    branch: list[Widget] = []
    fresh: dict[str, Any] = {}
    children = choice.children(values[choice.name]) if choice.children else []
    _assign(children[::-1], (), branch, fresh, DEFAULT_LIMITS)
    others = {name: value for name, value in values.items() if not name.startswith(prefix)}
    return (*before[:place], *branch, *before[place:]), {**others, **fresh}


def positional_values(node_type: NodeType, saved: Any) -> Sequence[Any]:
    """Returns `widgets_values` as a list, without the entries of inputs that became sockets."""
    if isinstance(saved, list) and not _may_hold_sockets(node_type, saved):
        return saved
    if isinstance(saved, str):
        return list(saved)  # JavaScript splits a string like this when it expects a list
    if not isinstance(saved, list | dict):
        return ()
    aligned = _without_sockets(node_type, saved)
    if aligned is not None:
        return aligned
    return saved if isinstance(saved, list) else ()


def _may_hold_sockets(node_type: NodeType, saved: list[Any]) -> bool:
    if any(spec.forced for spec in node_type.specs):
        return True
    return any(not widget.stored and widget.is_widget for widget in node_type.widgets)


def _without_sockets(node_type: NodeType, saved: list[Any] | dict[str, Any]) -> list[Any] | None:
    """Removes values that old files store for inputs that are now forced sockets. The lengths of
    the lists reveal whether the file is that old; returns None if it isn't clear."""
    if any(spec.type == DYNAMIC_GROUP for spec in node_type.specs):
        return None
    widgets = _initial_widgets(node_type)
    is_socket = _forced_sockets(node_type, widgets)
    if isinstance(saved, dict):
        compacted = list(saved.values())
    else:
        if True not in is_socket and len(saved) == sum(widget.stored for widget in widgets):
            return saved
        compacted = [
            value
            for index, value in enumerate(saved)
            if index >= len(widgets) or widgets[index].stored
        ]
        if len(compacted) != len(is_socket):
            compacted = saved
    if len(compacted) != len(is_socket):
        return None
    return [value for value, socket in zip(compacted, is_socket, strict=True) if not socket]


def _forced_sockets(node_type: NodeType, widgets: Sequence[Widget]) -> list[bool]:
    """Returns for each entry of an old list whether its input is now a forced socket."""
    names = {widget.name for widget in widgets}
    not_stored = {widget.name for widget in widgets if not widget.stored}
    places: list[bool] = []
    for spec in node_type.specs:
        forced = spec.forced
        if spec.name in not_stored or not (forced or spec.name in names):
            continue
        places.append(forced)
        if spec.options.get("control_after_generate"):
            places.append(False)
    return places


def _initial_widgets(node_type: NodeType) -> list[Widget]:
    return [widget for widget in as_laid_out(node_type) if widget.is_widget]


def as_laid_out(node_type: NodeType) -> list[Widget]:
    """Returns the sockets and widgets of a new node, with every choice at its default. The inputs
    of a choice's branch come before the choice, because the editor only moves them behind it
    later."""
    laid_out: list[Widget] = []
    pending = list(reversed(node_type.widgets))
    while pending:
        widget = pending.pop()
        if widget.children is None:
            laid_out.append(widget)
            continue
        pending.append(widget._replace(children=None))
        pending.extend(reversed(widget.children(widget.default)))
    return laid_out


def _cut_old_prefix(values: dict[str, Any]) -> None:
    sampler = values.get("sampler_name")
    if isinstance(sampler, str) and sampler.startswith(OLD_SAMPLER_PREFIX):
        values["sampler_name"] = sampler.removeprefix(OLD_SAMPLER_PREFIX)


def _assign_custom_combo(node_type: NodeType, positional: Sequence[Any]) -> WidgetValues:
    """Assigns the values of a custom combo. Its options are widgets, and the editor adds an option
    whenever the last one is filled."""
    choice = next(widget for widget in node_type.widgets if widget.is_widget)
    values: dict[str, Any] = {choice.name: positional[0] if positional else choice.default}
    widgets = [choice, Widget("index", "index", socket=False)]
    options: list[Any] = []
    while not options or options[-1]:
        place = len(options) + 2
        options.append(positional[place] if place < len(positional) else "")
        widgets.append(Widget(f"option{len(options)}", "text", "", socket=False))
        values[widgets[-1].name] = options[-1]
    if values[choice.name] is None and options[0]:
        values[choice.name] = str(options[0])
    values["index"] = option_index(values, values[choice.name])
    return WidgetValues(tuple(widgets), values, len(options) + 2)


def option_index(values: Mapping[str, Any], choice: Any) -> int:
    """Returns the index of the chosen option of a custom combo, or -1 if no option is chosen."""
    options = [value for name, value in values.items() if name.startswith("option")]
    return options.index(choice) if choice in options else -1
