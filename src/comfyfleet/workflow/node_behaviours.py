"""The one table of node classes for which the editor itself, or an extension of it, has behaviour.

Everything else follows from `object_info`. Each row says why it is here.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Behaviour(NamedTuple):
    reason: str
    # Drawn in the editor only: never emitted, its output is what comes into the same input slot.
    virtual: bool = False
    # Names its wire; a getter continues where the setter of the same name is fed.
    setter: bool = False
    getter_of: str = ""
    # May a getter look for its setter in the graphs around its own?
    looks_outward: bool = False
    # `filename_prefix` may hold %date:…% and %Node.widget% patterns.
    saves_files: bool = False
    # The name of its one widget, for patterns in file names.
    shows: str = ""
    # Inputs that the editor adds to what the server declares.
    extra_inputs: Mapping[str, Any] = {}
    # Buttons behind the widgets: they have no value, and yet are sent.
    buttons: tuple[str, ...] = ()
    # Numbers without a widget to see that it counts up by itself, and what they start with.
    counters: Mapping[str, int] = {}
    # Shows the pictures of its last run, and sends their addresses under this name.
    compares_as: str = ""
    # Its widgets are as many LoRAs as were added to it.
    lists_loras: bool = False
    # Saves its values by name instead of in a list.
    named_values: bool = False


_ONLY_IN_EDITOR = "an aid for reading the graph, known to the editor only"
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
    "Reroute": Behaviour("a bend in a wire, known to the editor only", virtual=True),
    "PrimitiveNode": Behaviour("writes its value into the widgets it is linked to", virtual=True),
    "SetNode": Behaviour("KJNodes: names the wire that comes in", virtual=True, setter=True),
    "GetNode": Behaviour(
        "KJNodes: goes on at the SetNode of that name, in its own graph or one around it",
        virtual=True, getter_of="SetNode", looks_outward=True,
    ),
    "easy setNode": Behaviour("Easy-Use: names the wire that comes in", virtual=True, setter=True),
    "easy getNode": Behaviour(
        "Easy-Use: goes on at the easy setNode of that name in its own graph",
        virtual=True, getter_of="easy setNode",
    ),
    "Reroute (rgthree)": Behaviour("rgthree: a bend in a wire", virtual=True),
    "Label (rgthree)": Behaviour(_ONLY_IN_EDITOR, virtual=True),
    "Bookmark (rgthree)": Behaviour(_ONLY_IN_EDITOR, virtual=True),
    "Fast Muter (rgthree)": Behaviour("rgthree: switches nodes while editing", virtual=True),
    "Fast Bypasser (rgthree)": Behaviour("rgthree: switches nodes while editing", virtual=True),
    "Fast Groups Muter (rgthree)": Behaviour("rgthree: switches groups while editing", virtual=True),
    "Fast Groups Bypasser (rgthree)": Behaviour("rgthree: switches groups while editing", virtual=True),
    "Fast Actions Button (rgthree)": Behaviour("rgthree: acts while editing", virtual=True),
    "Mute / Bypass Relay (rgthree)": Behaviour("rgthree: switches nodes while editing", virtual=True),
    "Mute / Bypass Repeater (rgthree)": Behaviour("rgthree: switches nodes while editing", virtual=True),
    "Node Collector (rgthree)": Behaviour("rgthree: gathers wires while editing", virtual=True),
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
        "rgthree: remembers the pictures that it compared", compares_as="rgthree_comparer"
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
# Classes that hand on the one value they hold. Servers of older versions lack them.
VALUE_CLASSES = frozenset(
    (
        "PrimitiveString", "PrimitiveStringMultiline", "PrimitiveInt", "PrimitiveFloat",
        "PrimitiveBoolean",
    )
)  # fmt: skip
# Its first widget chooses among the option widgets behind it, which grow as they are filled.
CUSTOM_COMBO = "CustomCombo"
# Sampler names were once saved with this prefix; the editor cuts it when it opens a file.
SAMPLER_CLASSES = ("KSampler", "KSamplerAdvanced")
OLD_SAMPLER_PREFIX = "sample_"


# VideoHelperSuite: every node of that pack keeps its values by name.
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
