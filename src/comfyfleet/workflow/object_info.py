"""Describes how the editor draws node classes (their sockets, widgets and outputs) according to a
server's `object_info`, and which lists of choices must be fetched from the server.

Values that determine what is sent are read strictly. Unknown values are ignored.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from comfyfleet.errors import InvalidInput
from comfyfleet.workflow.embedded import Opened
from comfyfleet.workflow.model import ANY_TYPE, new_tuple
from comfyfleet.workflow.node_behaviours import CUSTOM_COMBO, Behaviour, behaviour_of
from comfyfleet.workflow.node_inputs import (
    COMBO,
    WIDGET_TYPES,
    Growth,
    Input,
    InputSpec,
    Widget,
    drawn_type,
    input_spec,
    widgets_of,
)
from comfyfleet.workflow.parse import parse

DYNAMIC_COMBO = "COMFY_DYNAMICCOMBO_V3"
DYNAMIC_GROUP = "COMFY_DYNAMICGROUP_V3"
AUTOGROW = "COMFY_AUTOGROW_V3"
MATCH_TYPE = "COMFY_MATCHTYPE_V3"
DYNAMIC = frozenset((DYNAMIC_COMBO, DYNAMIC_GROUP, AUTOGROW))
UNUSUAL = DYNAMIC | {MATCH_TYPE}
WITH_WIDGET = frozenset((*WIDGET_TYPES, DYNAMIC_COMBO, DYNAMIC_GROUP))
UPLOAD_FLAGS = frozenset(("image_upload", "video_upload", "animated_image_upload"))
# Kinds of widgets whose values can't be assigned in order.
SPECIAL_KINDS = frozenset(("remote", "viewport", "comparer", "multiselect"))


class MatchGroups(NamedTuple):
    """Inputs and outputs that adopt the type of whatever is connected to them."""

    inputs: Mapping[str, tuple[str, str]]  # input name → (group, allowed types)
    outputs: Mapping[int, str]  # output slot → group


class NodeType(NamedTuple):
    name: str
    display_name: str
    specs: tuple[InputSpec, ...]
    # a dynamic class also has sockets here, which are neither stored nor sent
    widgets: tuple[Widget, ...]
    inputs: tuple[Input, ...]
    slots: Mapping[str, int]  # the index of each input by its name
    stored: tuple[str, ...]  # names of the widgets in the order of widgets_values
    outputs: tuple[str, ...]
    match: MatchGroups | None
    behaviour: Behaviour | None
    is_output: bool
    is_dynamic: bool  # whether the inputs depend on the node's values or links
    is_plain: bool  # whether the values can be assigned in order
    pack: str
    required_sockets: tuple[str, ...] = ()  # inputs that must be linked for the node to run

    @property
    def defaults(self) -> dict[str, Any]:
        return {widget.name: widget.default for widget in self.widgets if widget.is_widget}


class ObjectInfo(dict[str, Any]):
    """A server's object_info that caches the parsed node classes, for converting many workflows. It
    must not change afterwards."""

    def __init__(self, classes: Mapping[str, Any]) -> None:
        super().__init__(classes)
        self.known: dict[str, NodeType | None] = {}


class NodeTypes:
    """Reads node classes on demand, because a workflow uses only a dozen of a server's thousands of
    classes."""

    def __init__(
        self, object_info: Mapping[str, Any], remote_choices: Mapping[str, list[Any]] | None = None
    ) -> None:
        if not isinstance(object_info, Mapping):
            raise InvalidInput("object_info must be a JSON object with node classes by name")
        self._info = object_info
        self._remote_choices = remote_choices or {}
        self._known: dict[str, NodeType | None] = {}
        if isinstance(object_info, ObjectInfo) and not remote_choices:
            self._known = object_info.known

    def get(self, name: str) -> NodeType | None:
        try:
            return self._known[name]
        except KeyError:
            entry = self._info.get(name)
            node_type = _read_safely(name, entry) if isinstance(entry, dict) else None
            if node_type is not None and self._remote_choices:
                node_type = self._with_remote_choices(node_type)
            self._known[name] = node_type
            return node_type

    def _with_remote_choices(self, node_type: NodeType) -> NodeType:
        widgets = tuple(
            widget._replace(choices=self._remote_choices.get(widget.options["remote"].get("route")))
            if widget.kind == "remote"
            else widget
            for widget in node_type.widgets
        )
        return node_type._replace(widgets=widgets)


def _read_safely(name: str, entry: Mapping[str, Any]) -> NodeType:
    """Reads a class. Raises InvalidInput if the server's declaration is malformed."""
    try:
        return read_node_type(name, entry)
    except (TypeError, ValueError, AttributeError, LookupError) as problem:
        raise InvalidInput(f"object_info of {name} has an unexpected shape: {problem}") from None


def read_node_type(name: str, entry: Mapping[str, Any]) -> NodeType:
    behaviour = behaviour_of(name)
    specs = _ordered_specs(entry, behaviour)
    match: dict[str, tuple[str, str]] = {}
    kinds = {spec.type for spec in specs}
    if UNUSUAL.isdisjoint(kinds):
        inputs, widgets = _plain_slots(specs, name)
    else:
        widgets = _unusual_slots(specs, name, match)
        inputs = inputs_of(widgets)
    if behaviour is not None:
        widgets.extend(_widgets_of_behaviour(behaviour))
    is_dynamic = not DYNAMIC.isdisjoint(kinds)
    fields: tuple[Any, ...] = (
        name,
        entry.get("display_name") or name,
        specs,
        tuple(widgets),
        tuple(inputs),
        {slot[0]: index for index, slot in enumerate(inputs)},
        tuple([widget.name for widget in widgets if widget.stored]),
        _output_types(entry.get("output") or ()),
        MatchGroups(match, _match_outputs(entry)) if match else None,
        behaviour,
        bool(entry.get("output_node")),
        is_dynamic,
        not is_dynamic and _is_plain(name, specs, widgets, behaviour),
        str(entry.get("python_module") or ""),
        _required_sockets(entry, specs),
    )
    return new_tuple(NodeType, fields)


def _required_sockets(entry: Mapping[str, Any], specs: Iterable[InputSpec]) -> tuple[str, ...]:
    required = (entry.get("input") or {}).get("required") or {}
    return tuple(
        [
            spec.name
            for spec in specs
            if spec.name in required and spec.type not in DYNAMIC and not is_widget(spec)
        ]
    )


def _plain_slots(specs: Iterable[InputSpec], class_name: str) -> tuple[list[Input], list[Widget]]:
    """Lays out the inputs of an ordinary class, whose sockets don't depend on anything."""
    inputs: list[Input] = []
    widgets: list[Widget] = []
    for spec in specs:
        name, kind, _, _, forced, _ = spec
        drawn_as = drawn_type(spec)
        if drawn_as in WIDGET_TYPES and not forced:
            widgets.extend(WIDGET_TYPES[drawn_as](spec, class_name))
        else:
            inputs.append(new_tuple(Input, (name, kind, None, None)))
    inputs.extend(inputs_of(widgets))
    return inputs, widgets


def _unusual_slots(
    specs: Iterable[InputSpec], class_name: str, match: dict[str, tuple[str, str]]
) -> list[Widget]:
    """Lays out inputs that change dynamically or match each other's types, with sockets and widgets
    in one list."""
    sockets: list[Widget] = []
    widgets: list[Widget] = []
    for spec in specs:
        if is_widget(spec):
            widgets.extend(widgets_of_spec(spec, class_name))
        else:
            sockets.extend(_sockets(spec, match))
    return sockets + widgets


def is_widget(spec: InputSpec) -> bool:
    return drawn_type(spec) in WITH_WIDGET and not spec.forced


def _is_plain(
    name: str,
    specs: Iterable[InputSpec],
    widgets: Iterable[Widget],
    behaviour: Behaviour | None,
) -> bool:
    """Checks whether saved values can be assigned in order: no input is a forced socket, and every
    widget is stored and of an ordinary kind."""
    if name == CUSTOM_COMBO:
        return False
    if behaviour is not None and (behaviour.named_values or behaviour.lists_loras):
        return False
    usual = [
        widget.kind == "socket" or (widget.stored and widget.kind not in SPECIAL_KINDS)
        for widget in widgets
    ]
    return all(usual) and not any([spec.forced for spec in specs])  # noqa: C419


def inputs_of(widgets: Iterable[Widget]) -> list[Input]:
    return [
        new_tuple(
            Input,
            (
                widget.name,
                widget.input_type,
                None if widget.kind == "socket" else widget.name,
                None,
            ),
        )
        for widget in widgets
        if widget.socket
    ]


def _ordered_specs(entry: Mapping[str, Any], behaviour: Behaviour | None) -> tuple[InputSpec, ...]:
    """Returns the inputs in the order of `input_order`, followed by unlisted ones. The editor's
    upload button comes after all unlisted required inputs.
    """
    declared = entry.get("input") or {}
    required = declared.get("required") or {}
    optional = declared.get("optional") or {}
    if behaviour is not None:
        required = {**required, **behaviour.extra_inputs}
    order = entry.get("input_order") or {}
    names = order.get("required") or ()
    specs = [input_spec(name, required[name]) for name in names if name in required]
    rest: list[InputSpec] = []
    if len(specs) < len(required):
        seen = {spec.name for spec in specs}
        rest = [input_spec(name, required[name]) for name in required if name not in seen]
    button = _upload_button(specs + rest if rest else specs)
    if button is not None:
        specs = [spec for spec in specs if spec.name != button.name]
        rest = [*(spec for spec in rest if spec.name != button.name), button]
    if not optional:
        return (*specs, *rest)
    names = order.get("optional") or ()
    listed = [input_spec(name, optional[name], optional=True) for name in names if name in optional]
    seen = {spec.name for spec in (*specs, *rest, *listed)}
    unlisted = [
        input_spec(name, optional[name], optional=True) for name in optional if name not in seen
    ]
    return (*specs, *listed, *rest, *unlisted)


def _widgets_of_behaviour(behaviour: Behaviour) -> Iterator[Widget]:
    for name in behaviour.buttons:
        yield Widget(name, "button", None, socket=False)
    for name, start in behaviour.counters.items():
        yield Widget(name, "counter", start, socket=False)
    if behaviour.compares_as:
        yield Widget(behaviour.compares_as, "comparer", None, socket=False)


def _may_upload(options: Mapping[str, Any]) -> bool:
    return any(options.get(flag) is True for flag in UPLOAD_FLAGS)


def _upload_button(specs: Sequence[InputSpec]) -> InputSpec | None:
    """Returns the button that the editor adds if an input is a choice of uploadable files, or
    None."""
    for spec in specs:
        if spec.choices is None:
            continue
        if not UPLOAD_FLAGS.isdisjoint(spec.options) and _may_upload(spec.options):
            return InputSpec("upload", "IMAGEUPLOAD", widget_type="IMAGEUPLOAD")
        if spec.name == "audio" and spec.options.get("audio_upload") is True:
            return InputSpec("upload", "AUDIOUPLOAD", widget_type="AUDIOUPLOAD")
    return None


def widgets_of_spec(spec: InputSpec, class_name: str = "") -> Sequence[Widget]:
    if spec.type == DYNAMIC_COMBO:
        return (_dynamic_combo(spec, class_name),)
    if spec.type == DYNAMIC_GROUP:
        return (_dynamic_group(spec, class_name),)
    return widgets_of(spec, class_name)


def _dynamic_combo(spec: InputSpec, class_name: str) -> Widget:
    """Returns the widget of a choice whose options have inputs of their own, named
    `<choice>.<input>`."""
    options = [option for option in spec.options.get("options") or () if isinstance(option, dict)]
    keys = [option.get("key") for option in options]
    by_key = {option.get("key"): option.get("inputs") or {} for option in options}

    def children(value: Any) -> list[Widget]:
        inputs = by_key.get(value) if isinstance(value, str) and value else None
        return _children(spec.name, inputs, class_name) if isinstance(inputs, dict) else []

    return Widget(
        spec.name, "combo", keys[0] if keys else None, input_type=spec.type, choices=keys,
        children=children,
    )  # fmt: skip


def _dynamic_group(spec: InputSpec, class_name: str) -> Widget:
    """Returns the widget for the number of rows in a group. All rows have the same fields, named
    `<group>.<row>.<field>`."""
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
    children: list[Widget] = []
    for part in ("required", "optional"):
        declared = inputs.get(part)
        for name, entry in declared.items() if isinstance(declared, dict) else ():
            spec = input_spec(f"{prefix}.{name}", entry)
            if is_widget(spec):
                children.extend(widgets_of_spec(spec, class_name))
            else:
                children.extend(_sockets(spec, {}))
    return children


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
    """Yields the sockets that are shown before anything is linked."""
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
            child_widgets = widgets_of_spec(child) if is_widget(child) else _sockets(child, {})
            for widget in child_widgets:
                yield widget._replace(growth=growth)


def _match_outputs(entry: Mapping[str, Any]) -> dict[int, str]:
    groups = entry.get("output_matchtypes") or ()
    return {slot: str(group) for slot, group in enumerate(groups) if group}


def _output_types(declared: Iterable[Any]) -> tuple[str, ...]:
    return tuple(
        [
            COMBO if isinstance(kind, list) else ANY_TYPE if kind == MATCH_TYPE else str(kind)
            for kind in declared
        ]
    )


def remote_lists(opened: Opened, object_info: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the server's declaration of each remote list that a document needs, by route."""
    types = NodeTypes(object_info)
    declarations: dict[str, Mapping[str, Any]] = {}
    for name in sorted(set(_types_in(opened))):
        node_type = types.get(name)
        for widget in node_type.widgets if node_type else ():
            remote = widget.options.get("remote")
            if isinstance(remote, dict) and isinstance(remote.get("route"), str):
                declarations[remote["route"]] = remote
    return declarations


def _types_in(opened: Opened) -> Iterator[str]:
    if opened.workflow is None:
        entries = (opened.prompt or {}).values()
        yield from (str(entry.get("class_type")) for entry in entries if isinstance(entry, dict))
        return
    workflow = parse(opened.workflow)
    for graph in (workflow.root, *workflow.definitions.values()):
        yield from (node.type for node in graph.nodes)
    for group in workflow.group_nodes.values():
        nodes = group.get("nodes") if isinstance(group, dict) else None
        for node in nodes if isinstance(nodes, list) else ():
            if isinstance(node, dict):
                yield str(node.get("type"))
