"""The table of shorthands: what each means, and how its input is found."""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from comfyfleet.workflow.setting.addressing import Place
from comfyfleet.workflow.setting.files import lora_places, media_places, model_places
from comfyfleet.workflow.setting.flow import Flow
from comfyfleet.workflow.setting.numbers import number_source
from comfyfleet.workflow.setting.sampling import (
    Role,
    role_anywhere,
    role_of_latents,
    role_of_samplers,
    role_of_sources,
    seeds,
    unique,
)
from comfyfleet.workflow.setting.sizes import size_places
from comfyfleet.workflow.setting.texts import prompt_texts


class Several(Enum):
    """What to do when several inputs are found that hold different values."""

    SET = "set them all"
    WARN = "set them all, and say that they differed"
    LEAVE = "set none, and list them"


class Shorthand(NamedTuple):
    name: str
    help: str
    find: Callable[[Flow], list[Place]]
    several: Several = Several.WARN
    aliases: tuple[str, ...] = ()
    unlisted: bool = False  # a file that the server may not have yet
    beside: tuple[str, ...] = ()  # inputs of the same node that depend on it, and stay as they are


def _role(
    find: Callable[[Flow, Role], list[Place]], kinds: str, *names: str
) -> Callable[[Flow], list[Place]]:
    """Inputs of these types and names; a number behind a link is set where it is written."""
    role = Role(names, kinds.split())
    if {"INT", "FLOAT"}.isdisjoint(role.types):
        return lambda flow: find(flow, role)
    return lambda flow: unique([number_source(flow, place) for place in find(flow, role)])


def _sides(flow: Flow) -> list[Place]:
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
    Shorthand("size", "width and height in pixels, such as 1024x768", _sides),
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
