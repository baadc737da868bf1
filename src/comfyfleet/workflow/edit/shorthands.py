"""Shorthands: names for values that most prompts contain in some node, such as the prompt, seed,
size and input files. Their inputs are found by following the graph."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from comfyfleet.errors import InvalidInput, InvalidValue
from comfyfleet.workflow.edit.input_lookup import (
    LISTED_MAX,
    ExposedInput,
    Place,
    PromptEntry,
    hint,
    listed,
    quoted,
    read_entries,
    shown_value,
)
from comfyfleet.workflow.edit.prompt_flow import Flow, number_source, own_name
from comfyfleet.workflow.edit.samplers import (
    SamplerRole,
    models,
    prompt_texts,
    role_anywhere,
    role_of_latents,
    role_of_samplers,
    role_of_sources,
    samplers,
    seeds,
    size_places,
    unique,
)
from comfyfleet.workflow.edit.values import (
    Edit,
    ValueChange,
    change_input,
    combine_errors,
    edit_of,
    with_entries,
)
from comfyfleet.workflow.model import ObjectInfo
from comfyfleet.workflow.node_inputs import input_spec
from comfyfleet.workflow.object_info import DYNAMIC_COMBO

_SERVICE_MODEL = SamplerRole(("model", "model_name"), ("COMBO", DYNAMIC_COMBO))
_MODEL_NAMES = ("ckpt", "checkpoint", "unet", "model", "gguf")


def media_places(flow: Flow, kind: str, *flags: str) -> list[Place]:
    """Returns the inputs for an uploaded file of a kind. If no input is declared for uploads,
    returns inputs that are named after the kind.

    Loaders that only output a mask count only if there are no others.
    """
    candidates = [
        (entry, Place(entry.id, name))
        for entry in flow.needed.values()
        for name in flow.inputs_of(entry, "COMBO")
        if any(input_spec(name, flow.declared(entry)[name]).options.get(flag) for flag in flags)
    ]
    whole = [place for entry, place in candidates if set(entry.outputs) != {"MASK"}]
    return whole or [place for _, place in candidates] or role_anywhere(flow, _named_file(kind))


def _named_file(kind: str) -> SamplerRole:
    return SamplerRole((kind,), ("COMBO", "STRING"))


def model_places(flow: Flow) -> list[Place]:
    """Returns the inputs of the loaders whose models the samplers use. Without a sampler, returns
    the model choices of services."""
    if not samplers(flow):
        return role_of_sources(flow, _SERVICE_MODEL)
    places = [
        place
        for entry in _model_chain(flow)
        if not flow.linked(entry, "MODEL")
        for place in _file_places(flow, entry, _MODEL_NAMES)[:1]
    ]
    return unique(places)


def lora_places(flow: Flow) -> list[Place]:
    return unique(
        [place for entry in _model_chain(flow) for place in _file_places(flow, entry, ("lora",))]
    )


def _model_chain(flow: Flow) -> list[PromptEntry]:
    chains = (entry for sampler in samplers(flow) for entry in models(flow, sampler))
    return list({entry.id: entry for entry in chains}.values())


def _file_places(flow: Flow, entry: PromptEntry, names: tuple[str, ...]) -> list[Place]:
    return [
        Place(entry.id, name)
        for name in flow.inputs_of(entry, "COMBO")
        if any(part in own_name(name).lower() for part in names)
    ]


class Several(Enum):
    """The action to take if several inputs match and hold different values."""

    SET = "set them all"
    WARN = "set them all, and warn that they differed"
    LEAVE = "set none, and list them"


class Shorthand(NamedTuple):
    name: str
    help: str
    find: Callable[[Flow], list[Place]]
    several: Several = Several.WARN
    aliases: tuple[str, ...] = ()
    # also accepts a file that the server doesn't list yet
    unlisted: bool = False
    # inputs of the same node that depend on this input, but don't change with it
    beside: tuple[str, ...] = ()


def _role(
    find: Callable[[Flow, SamplerRole], list[Place]], kinds: str, *names: str
) -> Callable[[Flow], list[Place]]:
    """Returns a finder for inputs with these types and names. A linked number is set at its
    source."""
    role = SamplerRole(names, kinds.split())
    if {"INT", "FLOAT"}.isdisjoint(role.types):
        return lambda flow: find(flow, role)
    return lambda flow: unique([number_source(flow, place) for place in find(flow, role)])


def _sides_places(flow: Flow) -> list[Place]:
    return unique([place for size in size_places(flow) for place in size])


def _widths(flow: Flow) -> list[Place]:
    return unique([size.width for size in size_places(flow)])


def _heights(flow: Flow) -> list[Place]:
    return unique([size.height for size in size_places(flow)])


SHORTHANDS: tuple[Shorthand, ...] = (
    Shorthand(
        "prompt",
        "what to make: the text that feeds `positive` of the samplers",
        lambda flow: prompt_texts(flow).positive,
    ),
    Shorthand(
        "negative",
        "what to avoid: the text that feeds `negative` of the samplers",
        lambda flow: prompt_texts(flow).negative,
    ),
    Shorthand("lyrics", "the words of a song", _role(role_anywhere, "STRING", "lyrics")),
    Shorthand("seed", "seed of the noise", _role(seeds, "INT", "seed", "noise_seed"), Several.SET),
    Shorthand(
        "steps",
        "number of sampling steps",
        _role(role_of_samplers, "INT", "steps"),
        beside=("start_at_step", "end_at_step"),
    ),
    Shorthand(
        "cfg",
        "how closely to follow the prompt",
        _role(role_of_samplers, "FLOAT", "cfg", "cfg_conds"),
    ),
    Shorthand(
        "guidance",
        "how closely a distilled model follows the prompt",
        _role(role_anywhere, "FLOAT", "guidance"),
    ),
    Shorthand(
        "sampler",
        "sampling method, such as euler",
        _role(role_of_samplers, "COMBO", "sampler_name"),
    ),
    Shorthand(
        "scheduler",
        "spacing of the noise levels, such as karras",
        _role(role_of_samplers, "COMBO", "scheduler"),
    ),
    Shorthand(
        "denoise",
        "share of noise to start from, 0 to 1",
        _role(role_of_samplers, "FLOAT", "denoise"),
    ),
    Shorthand("size", "width and height in pixels, such as 1024x768", _sides_places),
    Shorthand("width", "width in pixels", _widths),
    Shorthand("height", "height in pixels", _heights),
    Shorthand(
        "batch",
        "how many at once",
        _role(role_of_latents, "INT", "batch_size"),
        aliases=("batch-size",),
    ),
    Shorthand(
        "frames",
        "length of a video in frames",
        _role(role_of_latents, "INT", "length", "frames", "num_frames", "frames_number"),
        aliases=("length",),
    ),
    Shorthand(
        "duration",
        "length of a video or sound in seconds",
        _role(role_of_sources, "INT FLOAT COMBO", "duration", "seconds"),
        aliases=("seconds",),
    ),
    Shorthand("fps", "frames per second", _role(role_anywhere, "INT FLOAT", "fps", "frame_rate")),
    Shorthand(
        "model",
        "file of the model that the samplers use",
        model_places,
        Several.LEAVE,
        aliases=("checkpoint",),
    ),
    Shorthand("lora", "file of the one LoRA", lora_places, Several.LEAVE),
    Shorthand(
        "image",
        "file of the one image that goes in",
        lambda flow: media_places(flow, "image", "image_upload", "animated_image_upload"),
        Several.LEAVE,
        unlisted=True,
    ),
    Shorthand(
        "video",
        "file of the one video that goes in",
        lambda flow: media_places(flow, "video", "video_upload"),
        Several.LEAVE,
        unlisted=True,
    ),
    Shorthand(
        "audio",
        "file of the one sound that goes in",
        lambda flow: media_places(flow, "audio", "audio_upload"),
        Several.LEAVE,
        unlisted=True,
    ),
    Shorthand(
        "prefix",
        "beginning of the names of the files that come out",
        _role(role_anywhere, "STRING", "filename_prefix"),
        Several.SET,
    ),
)


_BY_NAME = {name: one for one in SHORTHANDS for name in (one.name, *one.aliases)}
_SIZE = re.compile(r"\s*(\d{1,6})\s*[x×*,]\s*(\d{1,6})\s*", re.IGNORECASE)


class _Outcome(NamedTuple):
    changes: Sequence[ValueChange] = ()
    warnings: Sequence[str] = ()
    errors: Sequence[InvalidInput] = ()
    not_set: Sequence[str] = ()


def set_shorthands(
    prompt: Mapping[str, Any],
    object_info: ObjectInfo,
    values: Mapping[str, Any],
    *,
    check: bool = True,
    exposed: Sequence[ExposedInput] = (),
) -> Edit:
    """Sets all values whose inputs are found, or none if a value is invalid. `not_set` of the
    result describes the shorthands that match no input or several.

    If no input is found by following the graph, an input that a subgraph exposes under the
    shorthand's name is used.
    """
    entries = read_entries(prompt, object_info)
    outcomes: list[_Outcome] = []
    for name, value in values.items():
        # Find the inputs before any value is set: a new width must not affect which height is
        # found.
        flow = Flow(dict(entries))
        for shorthand, part in _parts(_shorthand(name), value):
            outcomes.append(
                _apply(entries, _places(flow, shorthand, exposed), shorthand, part, check=check)
            )
            entries.update((change.entry.id, change.entry) for change in outcomes[-1].changes)
    errors = [error for outcome in outcomes for error in outcome.errors]
    if errors:
        raise combine_errors(errors)
    changes = [change for outcome in outcomes for change in outcome.changes]
    changed = with_entries(prompt, entries, {change.entry.id for change in changes})
    warnings = dict.fromkeys(text for outcome in outcomes for text in outcome.warnings)
    not_set = dict.fromkeys(text for outcome in outcomes for text in outcome.not_set)
    edit = edit_of(changed, changes, list(warnings))
    return edit._replace(not_set=tuple(not_set))


def shorthand_places(
    prompt: Mapping[str, Any], object_info: ObjectInfo, name: str
) -> tuple[Place, ...]:
    """Returns the inputs that a shorthand refers to in this prompt."""
    return tuple(_shorthand(name).find(Flow(read_entries(prompt, object_info))))


def _shorthand(name: str) -> Shorthand:
    if name not in _BY_NAME:
        raise InvalidInput(f"unknown shorthand {quoted(name)}" + hint(name, list(_BY_NAME)))
    return _BY_NAME[name]


def _parts(shorthand: Shorthand, value: Any) -> Iterator[tuple[Shorthand, Any]]:
    if shorthand.name != "size":
        yield shorthand, value
        return
    for side, length in zip(("width", "height"), _parse_size(value), strict=True):
        own = _BY_NAME[side]._replace(name=shorthand.name, help=shorthand.help, aliases=(side,))
        yield own, length


def _parse_size(value: Any) -> tuple[Any, Any]:
    if isinstance(value, list | tuple) and len(value) == 2:
        return value[0], value[1]
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise InvalidValue(f"{shown_value(value)} isn't a size; use WIDTHxHEIGHT, such as 1024x768")
    return int(match[1]), int(match[2])


def _places(flow: Flow, shorthand: Shorthand, exposed: Sequence[ExposedInput]) -> Sequence[Place]:
    names = (shorthand.name, *shorthand.aliases)
    return shorthand.find(flow) or [
        exposed_input.place for exposed_input in exposed if exposed_input.is_called(*names)
    ]


def _apply(
    entries: Mapping[str, PromptEntry],
    places: Sequence[Place],
    shorthand: Shorthand,
    value: Any,
    *,
    check: bool,
) -> _Outcome:
    if not places:
        return _Outcome(not_set=[f"{shorthand.name}: not set, no input found ({shorthand.help})"])
    differ = _differ(entries, places)
    if differ and shorthand.several is Several.LEAVE:
        return _Outcome(not_set=[f"{shorthand.name}: {_found_several(entries, places)}"])
    warnings = list(_kept_beside(entries, shorthand, places))
    if differ and shorthand.several is Several.WARN:
        warnings.append(f"{shorthand.name}: {_set_several(places)}")
    checked = check and not shorthand.unlisted
    changes, errors = _change_all(entries, places, value, check=checked)
    return _Outcome(changes, warnings, errors)


def _change_all(
    entries: Mapping[str, PromptEntry], places: Sequence[Place], value: Any, *, check: bool
) -> tuple[list[ValueChange], list[InvalidInput]]:
    changed = dict(entries)
    changes: list[ValueChange] = []
    errors: list[InvalidInput] = []
    for place in places:
        try:
            change = change_input(changed, place, value, check=check)
        except InvalidInput as error:
            errors.append(error)
        else:
            changed[place.node_id] = change.entry
            changes.append(change)
    return changes, errors


def _differ(entries: Mapping[str, PromptEntry], places: Sequence[Place]) -> bool:
    values = [entries[place.node_id].inputs.get(place.input) for place in places]
    return any(value != values[0] for value in values)


def _found_several(entries: Mapping[str, PromptEntry], places: Sequence[Place]) -> str:
    texts = [
        f"{place.node_id}.{place.input} (now {shown_value(entries[place.node_id].inputs.get(place.input))})"
        for place in places[:LISTED_MAX]
    ]
    return f"not set, because several inputs match; set one of {listed(texts, len(places))}"


def _set_several(places: Sequence[Place]) -> str:
    texts = [f"{place.node_id}.{place.input}" for place in places[:LISTED_MAX]]
    return f"set in {len(places)} inputs that had different values: {listed(texts, len(places))}"


def _kept_beside(
    entries: Mapping[str, PromptEntry], shorthand: Shorthand, places: Sequence[Place]
) -> Iterator[str]:
    for place in places:
        entry = entries[place.node_id]
        names = [name for name in shorthand.beside if name in entry.inputs]
        if names:
            unchanged = " and ".join(f"{name} {shown_value(entry.inputs[name])}" for name in names)
            yield f"{shorthand.name}: {entry.name} keeps {unchanged}"
