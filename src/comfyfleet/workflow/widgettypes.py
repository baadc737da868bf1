"""Which input types the editor draws a widget for, and what each widget starts with.

A widget may bring companions: the control behind a seed, the filter behind a combo, an upload
button. Companions take their place in `widgets_values` though most are never sent.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from comfyfleet.workflow.texts import javascript_text

# Classes whose 3D view keeps its state under this name instead of `image`.
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
# What such a view sends while nobody has turned it: the camera's place at the start.
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
# What the editor shows, and sends, while a list that is kept elsewhere has not come.
LOADING = "Loading..."


class Growth(NamedTuple):
    """A group of sockets `<group>.<name>` that grows as its last one is linked."""

    group: str
    type: str
    names: tuple[str, ...]  # fixed names, or none and then prefix + number
    prefix: str
    sockets_max: int

    def following(self, name: str) -> str | None:
        """The socket after this one, if there may be one more."""
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


class Widget(NamedTuple):
    """`stored`: has a place in `widgets_values`; `sent`: is put into the prompt."""

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
    growth: "Growth | None" = None  # of the group of sockets that this one belongs to

    @classmethod
    def socket_only(cls, name: str, slot_type: str) -> "Widget":
        """A plain socket, so that sockets and widgets can stand in one list of slots."""
        return cls(name, "socket", stored=False, sent=False, input_type=slot_type)

    @property
    def is_widget(self) -> bool:
        return self.kind != "socket"


class _Spec(NamedTuple):
    name: str
    input_type: str
    options: Mapping[str, Any]
    choices: list[Any] | None
    class_name: str

    def widget(self, kind: str, default: Any, **fields: Any) -> Widget:
        return Widget(
            self.name, kind, default, input_type=self.input_type, options=self.options, **fields
        )

    def option(self, name: str, default: Any) -> Any:
        value = self.options.get(name)
        return default if value is None else value

    def companion(self, name: str, kind: str, default: Any = None, **fields: Any) -> Widget:
        return Widget(name, kind, default, socket=False, **fields)


def widgets_of(
    name: str,
    widget_type: str,
    input_type: str,
    options: Mapping[str, Any],
    choices: list[Any] | None,
    class_name: str,
) -> Iterator[Widget]:
    """The widget of an input and its companions, in the order of `widgets_values`."""
    return WIDGET_TYPES[widget_type](_Spec(name, input_type, options, choices, class_name))


def _int(spec: _Spec) -> Iterator[Widget]:
    yield spec.widget("int", spec.option("default", 0))
    if spec.option("control_after_generate", spec.name in SEED_NAMES):
        yield _control(spec)


def _float(spec: _Spec) -> Iterator[Widget]:
    yield spec.widget("float", spec.option("default", 0))
    if spec.options.get("control_after_generate"):
        yield _control(spec)


def _control(spec: _Spec) -> Widget:
    return spec.companion("control_after_generate", "control", "fixed", sent=False)


def _boolean(spec: _Spec) -> Iterator[Widget]:
    yield spec.widget("toggle", spec.option("default", False))


def _string(spec: _Spec) -> Iterator[Widget]:
    kind = "multiline" if spec.options.get("multiline") else "text"
    default = spec.option("default", "")
    yield spec.widget(kind, default if isinstance(default, str) else javascript_text(default))


def _markdown(spec: _Spec) -> Iterator[Widget]:
    yield spec.widget("multiline", "")  # the declared default is shown but not sent


def _combo(spec: _Spec) -> Iterator[Widget]:
    if spec.option("multi_select", False) is not False:
        yield spec.widget("multiselect", [])  # its declared default is not used
    else:
        kind = "remote" if spec.options.get("remote") else "combo"
        yield spec.widget(kind, _combo_default(spec), choices=spec.choices or [])
        remote = spec.options.get("remote")
        if isinstance(remote, dict):
            yield spec.companion("Auto-refresh after generation", "toggle", False, sent=False)
            if remote.get("refresh_button"):
                yield spec.companion("refresh", "button", "refresh")
    if spec.options.get("control_after_generate"):
        yield _control(spec)
        yield spec.companion("control_filter_list", "text", "", sent=False)


def _combo_default(spec: _Spec) -> Any:
    if spec.options.get("default"):
        return spec.options["default"]
    if spec.choices:
        return spec.choices[0]
    return LOADING if spec.options.get("remote") else ABSENT


class _Absent:
    """A value that JavaScript calls undefined: such an input is left out of the prompt."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


def _upload(spec: _Spec) -> Iterator[Widget]:
    yield spec.widget("button", "image", sent=False)


def _audio_view(spec: _Spec) -> Iterator[Widget]:
    yield spec.widget("view", "", stored=False, sent=False)


def _audio_record(spec: _Spec) -> Iterator[Widget]:
    yield spec.widget("view", "")
    yield spec.companion("record", "button", sent=False)


def _bounding_box(spec: _Spec) -> Iterator[Widget]:
    box = spec.option("default", {"x": 0, "y": 0, "width": 512, "height": 512})
    yield spec.widget("box", dict(box))
    for field in ("x", "y", "width", "height"):
        yield spec.companion(field, "int", box.get(field), sent=False)


def _view_3d(spec: _Spec) -> Iterator[Widget]:
    yield spec.widget("view", "")


def _load_3d(spec: _Spec) -> Iterator[Widget]:
    if spec.class_name in VIEWPORT_STATE_CLASSES:
        yield spec.widget("viewport", VIEWPORT_STATE)._replace(name="viewport_state")
        return
    if spec.class_name == "Load3D":  # the view of a file to choose has buttons for choosing it
        yield spec.companion("upload 3d model", "button", "upload3dmodel")
        yield spec.companion("upload extra resources", "button", "uploadExtraResources")
        yield spec.companion("clear", "button", "clear")
    yield spec.widget("view", "")._replace(name="image")


def _load_3d_advanced(spec: _Spec) -> Iterator[Widget]:
    state = {key: VIEWPORT_STATE[key] for key in ("camera_info", "model_3d_info")}
    yield spec.widget("viewport", state)._replace(name="viewport_state")


def _curve(spec: _Spec) -> Iterator[Widget]:
    straight = {"points": [[0, 0], [1, 1]], "interpolation": "monotone_cubic"}
    yield spec.widget("curve", spec.option("default", straight))


def _image_compare(spec: _Spec) -> Iterator[Widget]:
    yield spec.widget("view", ["", ""], stored=False)


def _video_edit(spec: _Spec) -> Iterator[Widget]:
    features = spec.option("features", ["trim", "crop"])
    default: dict[str, Any] = {}
    if "trim" in features:
        default["trim"] = {"start_time": 0, "duration": 0}
    if "crop" in features:
        default["crop"] = {"x": 0, "y": 0, "width": 0, "height": 0}
    yield spec.widget("video_edit", spec.option("default", default))


def _with_default(kind: str, default: Any) -> Callable[[_Spec], Iterator[Widget]]:
    def make(spec: _Spec) -> Iterator[Widget]:
        yield spec.widget(kind, spec.option("default", default))

    return make


def _hidden(spec: _Spec) -> Iterator[Widget]:
    yield spec.widget("view", None, stored=False, sent=False)


def _stored_only(spec: _Spec) -> Iterator[Widget]:
    yield spec.widget("view", "", sent=False)


def _dynamic(spec: _Spec) -> Iterator[Widget]:
    raise NotImplementedError("dynamic inputs are built by nodetypes, which knows their branches")


WIDGET_TYPES: Mapping[str, Callable[[_Spec], Iterator[Widget]]] = {
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
    "COMFY_DYNAMICCOMBO_V3": _dynamic,
    "COMFY_DYNAMICGROUP_V3": _dynamic,
}
