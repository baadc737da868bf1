"""The inputs of a node: how the server declares them in `object_info`, which sockets and widgets
the editor draws for them, and which link ends at which input."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from comfyfleet.workflow.model import Link, NodeSlot, new_tuple
from comfyfleet.workflow.text_patterns import javascript_text

COMBO = "COMBO"
UNKNOWN = "UNKNOWN"
NO_OPTIONS: Mapping[str, Any] = {}


class InputSpec(NamedTuple):
    name: str
    type: str
    options: Mapping[str, Any] = NO_OPTIONS
    choices: list[Any] | None = None
    forced: bool = False  # declared as a socket, regardless of its type
    widget_type: str = ""  # the type that determines the widget

    def option(self, name: str, default: Any) -> Any:
        value = self.options.get(name)
        return default if value is None else value


def input_spec(name: str, declared: Any, *, optional: bool = False) -> InputSpec:
    """Parses `[type or choices, options]`. The choices of a combo are in either place."""
    if not isinstance(declared, list) or not declared:
        return InputSpec(name, UNKNOWN, widget_type=UNKNOWN)
    kind = declared[0]
    if len(declared) == 1 and isinstance(kind, str):
        choices: list[Any] | None = [] if kind == COMBO else None
        return new_tuple(InputSpec, (name, kind, NO_OPTIONS, choices, False, kind))
    options = declared[1] if len(declared) > 1 else NO_OPTIONS
    if not isinstance(options, dict):
        options = NO_OPTIONS
    choices = None
    if isinstance(kind, list):
        choices, kind = kind, COMBO
    elif kind == COMBO:
        listed = options.get("options")
        choices = listed if isinstance(listed, list) else []
    elif not isinstance(kind, str):
        kind = UNKNOWN
    # In older declarations, `defaultInput` on an optional input means the same as `forceInput`.
    forced = bool(options.get("forceInput") or (optional and options.get("defaultInput")))
    widget_type = options.get("widgetType") or kind
    return new_tuple(InputSpec, (name, kind, options, choices, forced, widget_type))


# Classes whose 3D view stores its state under this name instead of `image`.
VIEWPORT_STATE_CLASSES = frozenset(
    (
        "Preview3DAdvanced",
        "Save3DAdvanced",
        "PreviewGaussianSplat",
        "PreviewPointCloud",
        "SaveGaussianSplat",
        "SavePointCloud",
    )
)
# The value that such a view sends until the user rotates it: the initial camera position.
VIEWPORT_STATE: Mapping[str, Any] = {
    "image": "",
    "mask": "",
    "normal": "",
    "camera_info": {
        "position": {"x": 10, "y": 10, "z": 10.000000000000002},
        "target": {"x": 0, "y": 0, "z": 0},
        "zoom": 1,
        "cameraType": "perspective",
        "quaternion": {
            "x": -0.2798481423331213,
            "y": 0.3647051996310008,
            "z": 0.11591689595929511,
            "w": 0.8804762392171493,
        },
        "fov": 35,
        "aspect": 1,
        "near": 0.01,
        "far": 10000,
        "frustum": {"left": -5, "right": 5, "top": 5, "bottom": -5},
    },
    "recording": "",
    "model_3d_info": [],
}
SEED_NAMES = ("seed", "noise_seed")
VALUE_TYPES = frozenset(("INT", "FLOAT", "BOOLEAN", "STRING", "COMBO"))
# The value that the editor shows and sends while the choices of a remote list are loading.
LOADING = "Loading..."


class _Absent:
    """Represents JavaScript's `undefined`. An input with this value is left out of the prompt."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


class Growth(NamedTuple):
    """A group of sockets named `<group>.<name>` that gets another socket when its last one is
    linked."""

    group: str
    type: str
    names: tuple[str, ...]  # fixed names; if empty, names are the prefix and a number
    prefix: str
    sockets_max: int

    def following(self, name: str) -> str | None:
        """Returns the name of the socket after this one, or None if the group can't grow
        further."""
        own = name[len(self.group) + 1 :]
        if self.names:
            ordinal = self.names.index(own) if own in self.names else None
        else:
            digits = own[len(own.rstrip("0123456789")) :]
            ordinal = int(digits) if digits and len(digits) < 10 else None
        if ordinal is None or ordinal + 1 >= self.sockets_max:
            return None
        return self.name_of(ordinal + 1)

    def name_of(self, ordinal: int) -> str:
        own = self.names[ordinal] if self.names else f"{self.prefix}{ordinal}"
        return f"{self.group}.{own}"


# The fields of a Widget before and after `input_type`: SOCKET holds those from `kind` to `socket`
# for a plain socket, PLAIN holds the remaining ones for most widgets.
SOCKET: tuple[Any, ...] = ("socket", None, False, False, True)
PLAIN: tuple[Any, ...] = (None, {}, None, None)


class Widget(NamedTuple):
    """A widget or a socket of a node. `stored` means that it has a place in `widgets_values`, and
    `sent` means that its value goes into the prompt.
    """

    name: str
    kind: str
    default: Any = None
    stored: bool = True
    sent: bool = True
    socket: bool = True  # has an input slot
    input_type: str = ""
    choices: list[Any] | None = None
    options: Mapping[str, Any] = {}
    children: Callable[[Any], list["Widget"]] | None = None
    growth: "Growth | None" = None  # how its group of sockets grows, if it belongs to one

    @classmethod
    def socket_only(cls, name: str, slot_type: str) -> "Widget":
        """Returns a plain socket, so that one list can hold both sockets and widgets."""
        return new_tuple(cls, (name, *SOCKET, slot_type, *PLAIN))

    @property
    def is_widget(self) -> bool:
        return self.kind != "socket"


def _plain(spec: InputSpec, kind: str, default: Any) -> Widget:
    name, slot_type, options, *_ = spec
    fields = (name, kind, default, True, True, True, slot_type, None, options, None, None)
    return new_tuple(Widget, fields)


def _companion(name: str, kind: str, default: Any = None, *, sent: bool = True) -> Widget:
    return Widget(name, kind, default, True, sent, False)


_CONTROL = _companion("control_after_generate", "control", "fixed", sent=False)
_FILTER = _companion("control_filter_list", "text", "", sent=False)
_REFRESH_SWITCH = _companion("Auto-refresh after generation", "toggle", False, sent=False)
_REFRESH_BUTTON = _companion("refresh", "button", "refresh")


def drawn_type(spec: InputSpec) -> str:
    """Returns the type that determines which widget an input gets.

    If only the JavaScript of a node pack knows the `widgetType`, the type of the value is used,
    because the pack's widget holds such a value as well.
    """
    if spec.type in VALUE_TYPES and spec.widget_type not in WIDGET_TYPES:
        return spec.type
    return spec.widget_type


def widgets_of(spec: InputSpec, class_name: str) -> Sequence[Widget]:
    """Returns the widget of an input and its companions, in the order of `widgets_values`."""
    return WIDGET_TYPES[drawn_type(spec)](spec, class_name)


def _int(spec: InputSpec, _: str) -> Sequence[Widget]:
    default, control = spec.options.get("default"), spec.options.get("control_after_generate")
    widget = _plain(spec, "int", 0 if default is None else default)
    if control or (control is None and spec.name in SEED_NAMES):
        return (widget, _CONTROL)
    return (widget,)


def _float(spec: InputSpec, _: str) -> Sequence[Widget]:
    default = spec.options.get("default")
    widget = _plain(spec, "float", 0 if default is None else default)
    return (widget, _CONTROL) if spec.options.get("control_after_generate") else (widget,)


def _boolean(spec: InputSpec, _: str) -> Sequence[Widget]:
    return (_plain(spec, "toggle", spec.option("default", False)),)


def _string(spec: InputSpec, _: str) -> Sequence[Widget]:
    default = spec.options.get("default")
    if not isinstance(default, str):
        default = "" if default is None else javascript_text(default)
    return (_plain(spec, "multiline" if spec.options.get("multiline") else "text", default),)


def _markdown(spec: InputSpec, _: str) -> Sequence[Widget]:
    return (_plain(spec, "multiline", ""),)  # the declared default is shown, but not sent


def _combo(spec: InputSpec, _: str) -> Sequence[Widget]:
    name, kind, options, choices, *_rest = spec
    if "remote" in options or "multi_select" in options or "control_after_generate" in options:
        return _special_combo(spec)
    default = options.get("default") or (choices[0] if choices else ABSENT)
    fields = (name, "combo", default, True, True, True, kind, choices, options, None, None)
    return (new_tuple(Widget, fields),)


def _special_combo(spec: InputSpec) -> Sequence[Widget]:
    """Returns the widgets of a combo with companions, remote choices or multiple selection."""
    options = spec.options
    control = (_CONTROL, _FILTER) if options.get("control_after_generate") else ()
    if options.get("multi_select") is not None:
        return (_plain(spec, "multiselect", []), *control)  # the declared default is not used
    kind = "remote" if options.get("remote") else "combo"
    widget = _plain(spec, kind, _combo_default(spec))._replace(choices=spec.choices)
    return (widget, *_refreshing(options.get("remote")), *control)


def _refreshing(remote: Any) -> Sequence[Widget]:
    if not isinstance(remote, dict):
        return ()
    if remote.get("refresh_button"):
        return (_REFRESH_SWITCH, _REFRESH_BUTTON)
    return (_REFRESH_SWITCH,)


def _combo_default(spec: InputSpec) -> Any:
    if spec.options.get("default"):
        return spec.options["default"]
    if spec.choices:
        return spec.choices[0]
    return LOADING if spec.options.get("remote") else ABSENT


def _upload(spec: InputSpec, _: str) -> Sequence[Widget]:
    return (_plain(spec, "button", "image")._replace(sent=False),)


def _audio_view(spec: InputSpec, _: str) -> Sequence[Widget]:
    return (_plain(spec, "view", "")._replace(stored=False, sent=False),)


def _audio_record(spec: InputSpec, _: str) -> Sequence[Widget]:
    return (_plain(spec, "view", ""), _companion("record", "button", sent=False))


def _bounding_box(spec: InputSpec, _: str) -> Sequence[Widget]:
    box = spec.option("default", {"x": 0, "y": 0, "width": 512, "height": 512})
    fields = [
        _companion(field, "int", box.get(field), sent=False)
        for field in ("x", "y", "width", "height")
    ]
    return (_plain(spec, "box", dict(box)), *fields)


def _view_3d(spec: InputSpec, _: str) -> Sequence[Widget]:
    return (_plain(spec, "view", ""),)


def _load_3d(spec: InputSpec, class_name: str) -> Sequence[Widget]:
    if class_name in VIEWPORT_STATE_CLASSES:
        return (_plain(spec, "viewport", VIEWPORT_STATE)._replace(name="viewport_state"),)
    view = _plain(spec, "view", "")._replace(name="image")
    return (*_LOAD_3D_BUTTONS, view) if class_name == "Load3D" else (view,)


# Buttons for choosing a file, which the editor shows with the view of a Load3D node.
_LOAD_3D_BUTTONS = (
    _companion("upload 3d model", "button", "upload3dmodel"),
    _companion("upload extra resources", "button", "uploadExtraResources"),
    _companion("clear", "button", "clear"),
)


def _load_3d_advanced(spec: InputSpec, _: str) -> Sequence[Widget]:
    state = {key: VIEWPORT_STATE[key] for key in ("camera_info", "model_3d_info")}
    return (_plain(spec, "viewport", state)._replace(name="viewport_state"),)


def _curve(spec: InputSpec, _: str) -> Sequence[Widget]:
    straight = {"points": [[0, 0], [1, 1]], "interpolation": "monotone_cubic"}
    return (_plain(spec, "curve", spec.option("default", straight)),)


def _image_compare(spec: InputSpec, _: str) -> Sequence[Widget]:
    return (_plain(spec, "view", ["", ""])._replace(stored=False),)


def _video_edit(spec: InputSpec, _: str) -> Sequence[Widget]:
    features = spec.option("features", ["trim", "crop"])
    default: dict[str, Any] = {}
    if "trim" in features:
        default["trim"] = {"start_time": 0, "duration": 0}
    if "crop" in features:
        default["crop"] = {"x": 0, "y": 0, "width": 0, "height": 0}
    return (_plain(spec, "video_edit", spec.option("default", default)),)


def _with_default(kind: str, default: Any) -> Callable[[InputSpec, str], Sequence[Widget]]:
    def make(spec: InputSpec, _: str) -> Sequence[Widget]:
        return (_plain(spec, kind, spec.option("default", default)),)

    return make


def _hidden(spec: InputSpec, _: str) -> Sequence[Widget]:
    return (_plain(spec, "view", None)._replace(stored=False, sent=False),)


def _stored_only(spec: InputSpec, _: str) -> Sequence[Widget]:
    return (_plain(spec, "view", "")._replace(sent=False),)


WIDGET_TYPES: Mapping[str, Callable[[InputSpec, str], Sequence[Widget]]] = {
    "INT": _int,
    "FLOAT": _float,
    "BOOLEAN": _boolean,
    "STRING": _string,
    "COMBO": _combo,
    "MARKDOWN": _markdown,
    "TEXTAREA": _with_default("text", ""),
    "COLOR": _with_default("color", "#000000"),
    "COLORS": _with_default("colors", []),
    "CURVE": _curve,
    "RANGE": _with_default("range", {"min": 0.0, "max": 1.0}),
    "BOUNDING_BOX": _bounding_box,
    "BOUNDING_BOXES": _with_default("boxes", []),
    "CHART": _with_default("chart", {}),
    "GALLERIA": _with_default("images", []),
    "PAINTER": _with_default("painter", ABSENT),
    "COMPOSITOR": _with_default("compositor", ABSENT),
    "VIDEO_EDIT": _video_edit,
    "IMAGECOMPARE": _image_compare,
    "IMAGEUPLOAD": _upload,
    "AUDIOUPLOAD": _upload,
    "AUDIO_UI": _audio_view,
    "AUDIO_RECORD": _audio_record,
    "WEBCAM": _view_3d,
    "LOAD_3D": _load_3d,
    "LOAD_3D_ADVANCED": _load_3d_advanced,
    "PREVIEW_3D": _view_3d,
    "RESOLUTION_PREVIEW": _hidden,
    "CAMERA_INFO_STATE": _hidden,
    "CAMERA_ANGLE_VIEW": _stored_only,
    "LIGHT_INFO_PREVIEW": _with_default("lights", []),
}


class Input(NamedTuple):
    """An input slot of a node, with the link that ends there."""

    name: str
    type: str
    widget: str | None = None
    link: Link | None = None


def link_inputs(
    inputs: Sequence[Input], saved: Sequence[NodeSlot], links: Sequence[Link]
) -> list[Input]:
    """Links the inputs of a node that has a fixed set of inputs."""
    if not links:
        return list(inputs)
    by_name = {slot.name: index for index, slot in enumerate(inputs)}
    by_id = {link.id: link for link in links}
    result = list(inputs)
    placed = 0
    for slot in saved:
        link = by_id.get(slot.link) if slot.link is not None else None
        index = by_name.get(slot.name)
        if link is not None and index is not None and result[index].link is None:
            result[index] = result[index]._replace(link=link)
            placed += 1
    if placed == len(links) and len(by_name) == len(inputs):
        return result
    linker = InputLinker(inputs, links)
    linker.realign(saved)
    return linker.result()


def link_dynamic_inputs(
    linker: "InputLinker",
    widgets: Sequence[Widget],
    final: Sequence[Input],
    saved: Sequence[NodeSlot],
) -> list[Input]:
    """Links the inputs of a node with choices that add inputs, or with groups that grow.

    `linker` holds the inputs of the initial layout, with every choice at its default. `final` are
    the inputs after the saved choices were applied.
    """
    choices = {widget.name for widget in widgets if widget.children is not None}
    if linker.has_branch_of(choices):
        linker.realign([slot for slot in saved if not linker.is_growing(slot.name)])
    linker.note_growth(widgets)
    for widget in widgets:
        if widget.children is not None:
            branch = [slot for slot in final if slot.name.startswith(f"{widget.name}.")]
            linker.switch_branch(f"{widget.name}.", branch)
    linker.realign(saved)
    return linker.result()


class _InputSlot:
    """An input slot of a node and the link that is currently attached to it."""

    __slots__ = ("link", "slot")

    def __init__(self, slot: Input) -> None:
        self.slot = slot
        self.link: Link | None = None


class InputLinker:
    """The inputs of a node while links are attached to them."""

    def __init__(self, inputs: Iterable[Input], links: Sequence[Link]) -> None:
        self._places = [_InputSlot(slot) for slot in inputs]
        self._loose: dict[int, Link] = {}  # links to slot numbers without an input
        self._growth: dict[str, Growth] = {}
        for link in links:
            if 0 <= link.target_slot < len(self._places):
                self._places[link.target_slot].link = link
            else:
                self._loose[link.id] = link

    def result(self) -> list[Input]:
        return [place.slot._replace(link=place.link) for place in self._places]

    def note_growth(self, widgets: Iterable[Widget]) -> None:
        """Notes which groups of sockets grow, and how."""
        for widget in widgets:
            if widget.growth is not None:
                self._growth[widget.growth.group] = widget.growth

    def is_growing(self, name: str) -> bool:
        return name.rpartition(".")[0] in self._growth

    def has_branch_of(self, choices: set[str]) -> bool:
        return any(place.slot.name.rpartition(".")[0] in choices for place in self._places)

    def switch_branch(self, prefix: str, branch: Sequence[Input]) -> None:
        """Recreates the inputs of a branch. A link survives only if the new branch has an input of
        the same name."""
        links_by_name = {
            place.slot.name: place.link for place in self._places if place.link is not None
        }
        rest = [place for place in self._places if not place.slot.name.startswith(prefix)]
        fresh = [_InputSlot(slot) for slot in branch]
        self._places = [*rest, *fresh]
        for place in fresh:
            place.link = links_by_name.get(place.slot.name)
        for place in fresh:
            if place.link is not None:
                self._grow(place.slot.name)

    def realign(self, saved: Sequence[NodeSlot]) -> None:
        """Moves each link to the input with the name that was saved for it. Repeats this while
        moved links make groups grow."""
        named = self._named_links(saved)
        skipped: set[int] = set()
        passes = 0
        while passes < len(named):
            moves = self._moves(named, skipped)
            if not moves:
                return
            removals = self._displaced(named, moves)
            stuck = self._stuck(moves, removals)
            if stuck:
                skipped.update(stuck)
                continue
            passes += 1
            self._apply(moves, removals)

    def _named_links(self, saved: Sequence[NodeSlot]) -> dict[int, tuple[Link, list[str]]]:
        here = {place.link.id: place.link for place in self._places if place.link is not None}
        here.update(self._loose)
        named: dict[int, tuple[Link, list[str]]] = {}
        for slot in saved:
            if slot.link is not None and slot.link in here:
                named.setdefault(slot.link, (here[slot.link], []))[1].append(slot.name)
        return named

    def _moves(
        self, named: dict[int, tuple[Link, list[str]]], skipped: set[int]
    ) -> list[tuple[Link, _InputSlot]]:
        moves = []
        for link, names in named.values():
            if link.id in skipped:
                continue
            fitting = [place for place in self._places if place.slot.name in names]
            sits_right = any(place.link is link for place in fitting)
            if fitting and not sits_right and self._is_present(link):
                moves.append((link, fitting[0]))
        return moves

    def _is_present(self, link: Link) -> bool:
        return link.id in self._loose or any(place.link is link for place in self._places)

    def _displaced(
        self, named: dict[int, tuple[Link, list[str]]], moves: list[tuple[Link, _InputSlot]]
    ) -> list[Link]:
        """Returns the links to remove because their own input no longer exists and another link is
        moved to their current input.
        """
        names_here = {place.slot.name for place in self._places}
        homeless = {link.id for link, names in named.values() if not names_here.intersection(names)}
        return [
            place.link for _, place in moves if place.link is not None and place.link.id in homeless
        ]

    def _stuck(self, moves: list[tuple[Link, _InputSlot]], removals: list[Link]) -> set[int]:
        """Returns the ids of links that can't be moved.

        If an input is held by a link that stays, these are the links that would move there. If two
        links would move to the same input, these are all links of the pass.
        """
        free = {link.id for link, _ in moves} | {link.id for link in removals}
        blocked = {
            link.id for link, place in moves if place.link is not None and place.link.id not in free
        }
        if blocked:
            return blocked
        destinations = {id(place) for _, place in moves}
        return set() if len(destinations) == len(moves) else {link.id for link, _ in moves}

    def _apply(self, moves: list[tuple[Link, _InputSlot]], removals: list[Link]) -> None:
        leaving = {link.id for link, _ in moves} | {link.id for link in removals}
        for place in self._places:
            if place.link is not None and place.link.id in leaving:
                place.link = None
        for link, place in moves:
            self._loose.pop(link.id, None)
            place.link = link
        for _, place in moves:
            self._grow(place.slot.name)

    def _grow(self, name: str) -> None:
        """Adds the next socket of a growing group once its last one is linked."""
        growth = self._growth.get(name.rpartition(".")[0])
        following = growth.following(name) if growth else None
        if growth is None or following is None:
            return
        if all(place.slot.name != following for place in self._places):
            self._places.append(_InputSlot(Input(following, growth.type)))
