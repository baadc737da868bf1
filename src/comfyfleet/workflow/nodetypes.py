"""What a node class looks like in the editor: sockets, widgets and outputs, from `object_info`.

Which widgets exist, their order and their defaults always come from the server, never from the
file. An input is a widget when its type is one that the editor draws a widget for and it is not
forced to be a socket; every other input is a plain socket. Sockets come first in slot order,
widgets after them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from comfyfleet.workflow.behaviours import Behaviour, behaviour_of
from comfyfleet.workflow.model import ANY_TYPE
from comfyfleet.workflow.widgettypes import WIDGET_TYPES, Growth, Widget, widgets_of

DYNAMIC_COMBO = "COMFY_DYNAMICCOMBO_V3"
DYNAMIC_GROUP = "COMFY_DYNAMICGROUP_V3"
AUTOGROW = "COMFY_AUTOGROW_V3"
MATCH_TYPE = "COMFY_MATCHTYPE_V3"
NO_OPTIONS: Mapping[str, Any] = {}


class InputSpec(NamedTuple):
    """One input as the server declares it."""

    name: str
    type: str
    options: Mapping[str, Any]
    choices: list[Any] | None = None
    forced: bool = False  # to be a socket, whatever its type

    @property
    def widget_type(self) -> str:
        return self.options.get("widgetType") or self.type

    @property
    def is_widget(self) -> bool:
        return not self.forced and self.widget_type in WIDGET_TYPES


class MatchGroups(NamedTuple):
    """Inputs and outputs that take on the type of what is connected to them."""

    inputs: Mapping[str, tuple[str, str]]  # input name → (group, allowed types)
    outputs: Mapping[int, str]  # output slot → group


class NodeType(NamedTuple):
    name: str
    display_name: str
    specs: tuple[InputSpec, ...]
    widgets: tuple[Widget, ...]  # sockets are widgets that are neither stored nor sent
    outputs: tuple[str, ...]
    match: MatchGroups | None
    behaviour: Behaviour | None
    is_output: bool
    is_dynamic: bool  # its inputs depend on its values or links
    pack: str


class NodeTypes:
    """Reads node classes on demand: of the thousands that a server has, a workflow uses a dozen."""

    def __init__(
        self, object_info: Mapping[str, Any], remote_choices: Mapping[str, list[Any]] | None = None
    ) -> None:
        self._info = object_info
        self._remote_choices = remote_choices or {}
        self._known: dict[str, NodeType | None] = {}

    def get(self, name: str) -> NodeType | None:
        try:
            return self._known[name]
        except KeyError:
            entry = self._info.get(name)
            known = read_node_type(name, entry) if isinstance(entry, dict) else None
            if known is not None and self._remote_choices:
                known = self._with_remote_choices(known)
            self._known[name] = known
            return known

    def _with_remote_choices(self, known: NodeType) -> NodeType:
        widgets = tuple(
            widget._replace(choices=self._remote_choices.get(widget.options["remote"].get("route")))
            if widget.kind == "remote"
            else widget
            for widget in known.widgets
        )
        return known._replace(widgets=widgets)


def read_node_type(name: str, entry: Mapping[str, Any]) -> NodeType:
    behaviour = behaviour_of(name)
    specs = tuple(_ordered_specs(entry, behaviour))
    match_inputs: dict[str, tuple[str, str]] = {}
    sockets: list[Widget] = []
    widgets: list[Widget] = []
    for spec in specs:
        if spec.is_widget:
            widgets.extend(widgets_of_spec(spec, name))
        else:
            sockets.extend(_sockets(spec, match_inputs))
    if behaviour is not None:
        widgets.extend(_widgets_of_behaviour(behaviour))
    match_outputs = _match_outputs(entry)
    return NodeType(
        name=name,
        display_name=entry.get("display_name") or name,
        specs=specs,
        widgets=(*sockets, *widgets),
        outputs=tuple(_output_type(output) for output in entry.get("output") or ()),
        match=MatchGroups(match_inputs, match_outputs) if match_inputs else None,
        behaviour=behaviour,
        is_output=bool(entry.get("output_node")),
        is_dynamic=any(widget.children or widget.growth for widget in (*sockets, *widgets)),
        pack=str(entry.get("python_module") or ""),
    )


def input_spec(name: str, declared: Any, *, optional: bool = False) -> InputSpec:
    """From `[type or choices, options]`; the options of a combo are in either place."""
    if not isinstance(declared, list | tuple) or not declared:
        return InputSpec(name, "UNKNOWN", NO_OPTIONS)
    options = declared[1] if len(declared) > 1 and isinstance(declared[1], dict) else NO_OPTIONS
    # An optional input that is a socket by default was the older way to say so.
    forced = bool(options.get("forceInput") or (optional and options.get("defaultInput")))
    kind = declared[0]
    if isinstance(kind, list):
        return InputSpec(name, "COMBO", options, kind, forced)
    if kind == "COMBO":
        choices = options.get("options")
        return InputSpec(name, kind, options, choices if isinstance(choices, list) else [], forced)
    return InputSpec(name, kind if isinstance(kind, str) else "UNKNOWN", options, None, forced)


def _ordered_specs(entry: Mapping[str, Any], behaviour: Behaviour | None) -> Iterator[InputSpec]:
    """In `input_order`, then whatever that leaves out; the editor's own additions come last."""
    declared = entry.get("input") or {}
    required = dict(declared.get("required") or {})
    optional = declared.get("optional") or {}
    if behaviour and behaviour.extra_inputs:
        required.update(behaviour.extra_inputs)
    _add_upload_buttons(required)
    order = entry.get("input_order") or {}
    names = [
        *((name, required) for name in order.get("required") or () if name in required),
        *((name, optional) for name in order.get("optional") or () if name in optional),
    ]
    seen = {name for name, _ in names}
    for name, source in names:
        yield input_spec(name, source[name], optional=source is optional)
    for source in (required, optional):
        for name in source:
            if name not in seen:
                seen.add(name)
                yield input_spec(name, source[name], optional=source is optional)


def _widgets_of_behaviour(behaviour: Behaviour) -> Iterator[Widget]:
    for name in behaviour.buttons:
        yield Widget(name, "button", None, socket=False)
    if behaviour.compares_as:
        yield Widget(behaviour.compares_as, "comparer", None, socket=False)


def _add_upload_buttons(required: dict[str, Any]) -> None:
    for declared in list(required.values()):
        if not isinstance(declared, list) or len(declared) < 2 or not isinstance(declared[1], dict):
            continue
        options = declared[1]
        is_combo = isinstance(declared[0], list) or declared[0] == "COMBO"
        if is_combo and any(
            options.get(flag) is True
            for flag in ("image_upload", "video_upload", "animated_image_upload")
        ):
            required["upload"] = ["IMAGEUPLOAD", {}]
            break
    audio = required.get("audio")
    if isinstance(audio, list) and len(audio) > 1 and audio[1].get("audio_upload") is True:
        required["upload"] = ["AUDIOUPLOAD", {}]


def widgets_of_spec(spec: InputSpec, class_name: str = "") -> Iterator[Widget]:
    if spec.type == DYNAMIC_COMBO:
        yield _dynamic_combo(spec, class_name)
    elif spec.type == DYNAMIC_GROUP:
        yield _dynamic_group(spec, class_name)
    else:
        yield from widgets_of(
            spec.name, spec.widget_type, spec.type, spec.options, spec.choices, class_name
        )


def _dynamic_combo(spec: InputSpec, class_name: str) -> Widget:
    """A choice whose selected option brings inputs of its own, named `<choice>.<input>`."""
    options = [option for option in spec.options.get("options") or () if isinstance(option, dict)]
    keys = [option.get("key") for option in options]
    by_key = {option.get("key"): option.get("inputs") or {} for option in options}

    def children(value: Any) -> list[Widget]:
        inputs = by_key.get(value) if isinstance(value, str) and value else None
        return _children(spec.name, inputs, class_name) if inputs else []

    return Widget(
        spec.name, "combo", keys[0] if keys else None, input_type=spec.type, choices=keys,
        children=children,
    )  # fmt: skip


def _dynamic_group(spec: InputSpec, class_name: str) -> Widget:
    """A number of rows, each with the same fields, named `<group>.<row>.<field>`."""
    minimum = spec.options.get("min") or 0
    template = spec.options.get("template") or {}

    def children(value: Any) -> list[Widget]:
        rows = max(minimum, int(value)) if isinstance(value, int | float) else minimum
        return [
            child
            for row in range(rows)
            for child in _children(f"{spec.name}.{row}", template, class_name)
        ]

    return Widget(spec.name, "number", minimum, sent=False, socket=False, children=children)


def _children(prefix: str, inputs: Mapping[str, Any], class_name: str) -> list[Widget]:
    found: list[Widget] = []
    for part in ("required", "optional"):
        for name, declared in (inputs.get(part) or {}).items():
            spec = input_spec(f"{prefix}.{name}", declared)
            if spec.is_widget:
                found.extend(widgets_of_spec(spec, class_name))
            else:
                found.extend(_sockets(spec, {}))
    return found


def _sockets(spec: InputSpec, match: dict[str, tuple[str, str]]) -> Iterator[Widget]:
    if spec.type == AUTOGROW:
        yield from _autogrow_sockets(spec)
        return
    slot_type = _socket_type(spec)
    if spec.type == MATCH_TYPE:
        template = spec.options.get("template") or {}
        match[spec.name] = (str(template.get("template_id")), slot_type)
    yield Widget.socket_only(spec.name, slot_type)


def _socket_type(spec: InputSpec) -> str:
    if spec.type != MATCH_TYPE:
        return spec.type
    template = spec.options.get("template") or {}
    return str(template.get("allowed_types") or ANY_TYPE)


def _autogrow_sockets(spec: InputSpec) -> Iterator[Widget]:
    """The sockets shown before anything is linked."""
    template = spec.options.get("template") or {}
    inputs = template.get("input") or {}
    fields = [*(inputs.get("required") or {}).items(), *(inputs.get("optional") or {}).items()]
    names = tuple(map(str, template.get("names") or ()))
    least = template.get("min", 1)
    most = len(names) if names else template.get("max", 100)
    for key, declared in fields:
        prefix = template.get("prefix") or "" if len(fields) == 1 else key
        field = input_spec("", declared)
        growth = Growth(spec.name, _socket_type(field), names, prefix, most)
        for ordinal in range(min(most, max(1, least + 1))):
            child = field._replace(name=growth.name_of(ordinal))
            made = widgets_of_spec(child, "") if child.is_widget else _sockets(child, {})
            for widget in made:
                yield widget._replace(growth=growth)


def _match_outputs(entry: Mapping[str, Any]) -> dict[int, str]:
    groups = entry.get("output_matchtypes") or ()
    return {slot: str(group) for slot, group in enumerate(groups) if group}


def _output_type(declared: Any) -> str:
    if isinstance(declared, list):
        return "COMBO"
    return ANY_TYPE if declared == MATCH_TYPE else str(declared)
