"""A table of all node classes that the editor or one of its extensions handles specially.

The rest follows from `object_info`. Each row has a reason.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Behaviour(NamedTuple):
    reason: str
    # Exists only in the editor and is never emitted. Its output is whatever feeds the same input
    # slot.
    virtual: bool = False
    # Names the link that it receives. A getter continues at the input of the setter with the same
    # name.
    setter: bool = False
    getter_of: str = ""
    # Whether a getter also looks for its setter in the enclosing graphs.
    looks_outward: bool = False
    # `filename_prefix` can contain %date:…% and %Node.widget% patterns.
    saves_files: bool = False
    # The name of its only widget, for patterns in file names.
    shows: str = ""
    # Inputs that the editor adds to the server's declaration.
    extra_inputs: Mapping[str, Any] = {}
    # Buttons after the widgets. They have no value, but are sent.
    buttons: tuple[str, ...] = ()
    # Numbers without a widget that count up automatically, and their initial values.
    counters: Mapping[str, int] = {}
    # Shows the images of its last run, and sends their URLs under this name.
    compares_as: str = ""
    # The node's widgets are the LoRAs that were added to it.
    lists_loras: bool = False
    # Saves its values by name instead of in a list.
    named_values: bool = False


_ONLY_IN_EDITOR = "helps to read the graph; exists only in the editor"
_SAVES = "the editor fills in patterns in its filename_prefix"
_AUDIO = {"audioUI": ["AUDIO_UI", {}]}
_VIEW_3D = {"image": ["PREVIEW_3D"]}


def _saving(**fields: Any) -> Behaviour:
    return Behaviour(_SAVES, saves_files=True, **fields)


def _growing_by_button() -> Behaviour:
    return Behaviour("KJNodes: grows inputs at the push of a button", buttons=("Update inputs",))


BEHAVIOURS: Mapping[str, Behaviour] = {
    "Note": Behaviour(_ONLY_IN_EDITOR, virtual=True, shows="text"),
    "MarkdownNote": Behaviour(_ONLY_IN_EDITOR, virtual=True, shows="text"),
    "Reroute": Behaviour("a bend in a link; exists only in the editor", virtual=True),
    "PrimitiveNode": Behaviour("writes its value into the widgets it is linked to", virtual=True),
    "SetNode": Behaviour("KJNodes: names the link that it receives", virtual=True, setter=True),
    "GetNode": Behaviour(
        "KJNodes: continues at the SetNode of that name, in its own graph or an enclosing one",
        virtual=True, getter_of="SetNode", looks_outward=True,
    ),
    "easy setNode": Behaviour("Easy-Use: names the link that it receives", virtual=True, setter=True),
    "easy getNode": Behaviour(
        "Easy-Use: continues at the easy setNode of that name in its own graph",
        virtual=True, getter_of="easy setNode",
    ),
    "Reroute (rgthree)": Behaviour("rgthree: a bend in a link", virtual=True),
    "Label (rgthree)": Behaviour(_ONLY_IN_EDITOR, virtual=True),
    "Bookmark (rgthree)": Behaviour(_ONLY_IN_EDITOR, virtual=True),
    "Fast Muter (rgthree)": Behaviour("rgthree: switches nodes while editing", virtual=True),
    "Fast Bypasser (rgthree)": Behaviour("rgthree: switches nodes while editing", virtual=True),
    "Fast Groups Muter (rgthree)": Behaviour("rgthree: switches groups while editing", virtual=True),
    "Fast Groups Bypasser (rgthree)": Behaviour("rgthree: switches groups while editing", virtual=True),
    "Fast Actions Button (rgthree)": Behaviour("rgthree: acts while editing", virtual=True),
    "Mute / Bypass Relay (rgthree)": Behaviour("rgthree: switches nodes while editing", virtual=True),
    "Mute / Bypass Repeater (rgthree)": Behaviour("rgthree: switches nodes while editing", virtual=True),
    "Node Collector (rgthree)": Behaviour("rgthree: bundles links while editing", virtual=True),
    "Random Unmuter (rgthree)": Behaviour("rgthree: switches nodes while editing", virtual=True),
    "SaveImage": _saving(),
    "SaveImageAdvanced": _saving(),
    "SaveSVGNode": _saving(),
    "SaveVideo": _saving(),
    "SaveAnimatedWEBP": _saving(),
    "SaveAnimatedPNG": _saving(),
    "SaveWEBM": _saving(),
    "SaveAudio": _saving(extra_inputs=_AUDIO),
    "SaveAudioMP3": _saving(extra_inputs=_AUDIO),
    "SaveAudioOpus": _saving(extra_inputs=_AUDIO),
    "SaveAudioAdvanced": _saving(extra_inputs=_AUDIO),
    "SaveGLB": _saving(extra_inputs=_VIEW_3D),
    "Save3DAdvanced": _saving(),
    "SaveGaussianSplat": _saving(),
    "SavePointCloud": _saving(),
    "CLIPSave": _saving(),
    "VAESave": _saving(),
    "ModelSave": _saving(),
    "LoraSave": _saving(),
    "SaveLatent": _saving(),
    "SaveImageKJ": _saving(),
    "SaveImageWithAlpha": _saving(),
    "SaveStringKJ": _saving(),
    "DecodeAndSaveVideo": _saving(),
    "ModelSaveKJ": _saving(),
    "LoraExtractKJ": _saving(),
    "ConditioningMultiCombine": _growing_by_button(),
    "ImageBatchMulti": _growing_by_button(),
    "ImageAddMulti": _growing_by_button(),
    "CrossFadeImagesMulti": _growing_by_button(),
    "TransitionImagesMulti": _growing_by_button(),
    "ImageConcatMulti": _growing_by_button(),
    "MaskBatchMulti": _growing_by_button(),
    "JoinStringMulti": _growing_by_button(),
    "SoundReactive": Behaviour(
        "KJNodes: listens while editing", buttons=("Start mic capture", "Stop mic capture")
    ),
    "Image Comparer (rgthree)": Behaviour(
        "rgthree: remembers the images that it compared", compares_as="rgthree_comparer"
    ),
    "Power Lora Loader (rgthree)": Behaviour(
        "rgthree: a list of LoRAs to which lines are added while editing", lists_loras=True
    ),
    "VHS_VideoCombine": _saving(named_values=True),
    "VHS_BatchManager": Behaviour(
        "VideoHelperSuite: counts its batches", named_values=True, counters={"count": 0}
    ),
    "LoadAudio": Behaviour("shows a player", extra_inputs=_AUDIO),
    "PreviewAudio": Behaviour("shows a player", extra_inputs=_AUDIO),
    "Preview3D": Behaviour("shows a 3D view that is sent as `image`", extra_inputs=_VIEW_3D),
    "Load3DAdvanced": Behaviour(
        "keeps the state of its view", extra_inputs={"viewport_state": ["LOAD_3D_ADVANCED", {}]}
    ),
}  # fmt: skip

PRIMITIVE = "PrimitiveNode"
# Classes that pass on the one value that they hold. Older servers lack them.
VALUE_CLASSES = frozenset(
    (
        "PrimitiveString", "PrimitiveStringMultiline", "PrimitiveInt", "PrimitiveFloat",
        "PrimitiveBoolean",
    )
)  # fmt: skip
# A class whose first widget chooses among option widgets. The editor adds an option whenever the
# last one is filled.
CUSTOM_COMBO = "CustomCombo"
# Classes whose sampler names used to be saved with this prefix. The editor removes the prefix when
# it opens a file.
SAMPLER_CLASSES = ("KSampler", "KSamplerAdvanced")
OLD_SAMPLER_PREFIX = "sample_"


# Every node of VideoHelperSuite saves its values by name.
NAMED_VALUES_PREFIX = "VHS_"
_NAMED_VALUES = Behaviour("VideoHelperSuite: saves values by name", named_values=True)


def behaviour_of(node_type: str) -> Behaviour | None:
    behaviour = BEHAVIOURS.get(node_type)
    if behaviour is None and node_type.startswith(NAMED_VALUES_PREFIX):
        return _NAMED_VALUES
    return behaviour


def is_virtual(node_type: str) -> bool:
    behaviour = BEHAVIOURS.get(node_type)
    return behaviour is not None and behaviour.virtual
