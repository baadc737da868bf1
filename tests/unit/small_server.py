"""The node classes of a small server, as its `object_info` would tell them."""

from collections.abc import Mapping, Sequence
from typing import Any

SEED = ["INT", {"default": 0, "min": 0, "max": 2**64 - 1, "control_after_generate": True}]
STEPS = ["INT", {"default": 20, "min": 1, "max": 10_000}]
CFG = ["FLOAT", {"default": 8.0, "min": 0.0, "max": 100.0, "step": 0.1}]
DENOISE = ["FLOAT", {"default": 1.0, "min": 0.0, "max": 1.0}]
SIDE = ["INT", {"default": 512, "min": 16, "max": 16_384, "step": 8}]
COUNT = ["INT", {"default": 1, "min": 1, "max": 4096}]
PROMPT_TEXT = ["STRING", {"multiline": True, "dynamicPrompts": True}]
TEXT = ["STRING", {"multiline": True}]
LINE = ["STRING", {"default": ""}]
SAMPLERS = [
    "euler", "euler_ancestral", "heun", "dpm_2", "lms", "dpmpp_2m", "dpmpp_2m_sde", "ddim", "uni_pc", "lcm",
]  # fmt: skip
SCHEDULERS = ["COMBO", {"options": ["normal", "karras", "simple"]}]
CHECKPOINTS = [["v1-5.safetensors", "sdxl/base.safetensors", "sdxl/refiner.safetensors"], {}]
MATCHING = ["COMFY_MATCHTYPE_V3", {"template": {"template_id": "t", "allowed_types": "*"}}]


def node_class(
    required: Mapping[str, Any],
    output: Sequence[str] = (),
    *,
    optional: Mapping[str, Any] | None = None,
    display_name: str = "",
    output_name: Sequence[str] = (),
    is_output: bool = False,
) -> dict[str, Any]:
    return {
        "input": {"required": dict(required), "optional": dict(optional or {})},
        "output": list(output),
        "output_name": list(output_name or output),
        "display_name": display_name,
        "output_node": is_output,
    }


def socket(kind: str) -> list[Any]:
    return [kind, {}]


CONDITIONED = {"positive": socket("CONDITIONING"), "negative": socket("CONDITIONING")}
RESIZE_TYPES = [
    {
        "key": "scale dimensions",
        "inputs": {"required": {"width": SIDE, "height": SIDE, "crop": [["disabled", "center"]]}},
    },
    {"key": "scale width", "inputs": {"required": {"width": SIDE}}},
    {"key": "scale by", "inputs": {"required": {"multiplier": ["FLOAT", {"default": 2.0}]}}},
    {"key": "match size", "inputs": {"required": {"match": socket("IMAGE")}}},
]

OBJECT_INFO: Mapping[str, Any] = {
    "KSampler": node_class(
        {
            "model": socket("MODEL"),
            "seed": SEED,
            "steps": STEPS,
            "cfg": CFG,
            "sampler_name": [SAMPLERS, {}],
            "scheduler": SCHEDULERS,
            **CONDITIONED,
            "latent_image": socket("LATENT"),
            "denoise": DENOISE,
        },
        ["LATENT"],
        display_name="KSampler",
    ),
    "CheckpointLoaderSimple": node_class(
        {"ckpt_name": CHECKPOINTS}, ["MODEL", "CLIP", "VAE"], display_name="Load Checkpoint"
    ),
    "CLIPTextEncode": node_class(
        {"text": PROMPT_TEXT, "clip": socket("CLIP")},
        ["CONDITIONING"],
        display_name="CLIP Text Encode (Prompt)",
    ),
    "EmptyLatentImage": node_class(
        {"width": SIDE, "height": SIDE, "batch_size": COUNT},
        ["LATENT"],
        display_name="Empty Latent",
    ),
    "VAEDecode": node_class({"samples": socket("LATENT"), "vae": socket("VAE")}, ["IMAGE"]),
    "SaveImage": node_class(
        {"images": socket("IMAGE"), "filename_prefix": ["STRING", {"default": "ComfyUI"}]},
        display_name="Save Image",
        is_output=True,
    ),
    "LoadImage": node_class(
        {"image": [["cat.png"], {"image_upload": True}]},
        ["IMAGE", "MASK"],
        display_name="Load Image",
    ),
    "ResizeImage": node_class(
        {
            "input": socket("IMAGE"),
            "resize_type": ["COMFY_DYNAMICCOMBO_V3", {"options": RESIZE_TYPES}],
        },
        ["IMAGE"],
    ),
    "Paint": node_class(
        {
            "color": ["COLOR", {"default": "#ffffff"}],
            "box": ["BOUNDING_BOX", {}],
            "glow": ["BOOLEAN", {"default": False}],
            "size": [[1, 2, 4], {}],
            "tags": ["COMBO", {"options": ["red", "green", "blue"], "multiselect": True}],
            "anything": ["*", {}],
            "layers": ["INT", {"default": 1, "min": 1, "max": 9}],
        },
        ["IMAGE"],
    ),
    "CustomCombo": node_class({"choice": ["COMBO", {"options": []}]}, ["STRING", "INT"]),
    # Classes of no pack at all: nodes are known by the types that they take and give.
    "Guide": node_class(
        {"conditioning": socket("CONDITIONING"), "guidance": ["FLOAT", {"default": 3.5}]},
        ["CONDITIONING"],
    ),
    "ZeroOut": node_class({"conditioning": socket("CONDITIONING")}, ["CONDITIONING"]),
    "Control": node_class(
        {**CONDITIONED, "image": socket("IMAGE")},
        ["CONDITIONING", "CONDITIONING"],
        output_name=["positive", "negative"],
    ),
    "TwoEncoders": node_class(
        {"clip": socket("CLIP"), "text_g": PROMPT_TEXT, "text_l": PROMPT_TEXT, "name": LINE},
        ["CONDITIONING"],
    ),
    "BothSides": node_class(
        {"clip": socket("CLIP"), "prompt": PROMPT_TEXT, "negative_prompt": PROMPT_TEXT},
        ["CONDITIONING", "CONDITIONING"],
        output_name=["positive", "negative"],
    ),
    "Song": node_class(
        {"clip": socket("CLIP"), "tags": PROMPT_TEXT, "lyrics": PROMPT_TEXT, "duration": CFG},
        ["CONDITIONING"],
    ),
    "DepthHint": node_class({}, ["CONDITIONING"]),
    "PlainGuider": node_class(
        {"model": socket("MODEL"), "conditioning": socket("CONDITIONING")}, ["GUIDER"]
    ),
    "DualGuider": node_class(
        {
            "cond1": socket("CONDITIONING"),
            "cond2": socket("CONDITIONING"),
            "negative": socket("CONDITIONING"),
            "empty_conditioning": socket("CONDITIONING"),
            "cfg_conds": CFG,
        },
        ["GUIDER"],
    ),
    "GuidedSampler": node_class(
        {
            "noise": socket("NOISE"),
            "guider": socket("GUIDER"),
            "sampler": socket("SAMPLER"),
            "sigmas": socket("SIGMAS"),
            "latent_image": socket("LATENT"),
        },
        ["LATENT"],
    ),
    "StagedSampler": node_class(
        {
            "add_noise": [["enable", "disable"]],
            "noise_seed": SEED,
            "steps": STEPS,
            "end_at_step": STEPS,
            **CONDITIONED,
            "latent_image": socket("LATENT"),
        },
        ["LATENT"],
    ),
    "Noise": node_class({"noise_seed": SEED}, ["NOISE"]),
    "Method": node_class({"sampler_name": [SAMPLERS, {}]}, ["SAMPLER"]),
    "Schedule": node_class(
        {"steps": STEPS, "scheduler": SCHEDULERS, "width": SIDE, "height": SIDE}, ["SIGMAS"]
    ),
    "SplitSchedule": node_class({"sigmas": socket("SIGMAS"), "step": COUNT}, ["SIGMAS"]),
    "Shift": node_class({"model": socket("MODEL"), "width": SIDE, "height": SIDE}, ["MODEL"]),
    "LoraLoader": node_class(
        {"model": socket("MODEL"), "lora_name": [["a.safetensors", "b.safetensors"]]}, ["MODEL"]
    ),
    "LatentUpscale": node_class(
        {"samples": socket("LATENT"), "width": SIDE, "height": SIDE}, ["LATENT"]
    ),
    "EmptyVideo": node_class(
        {"width": SIDE, "height": SIDE, "length": COUNT, "batch_size": COUNT}, ["LATENT"]
    ),
    "VAEEncode": node_class({"pixels": socket("IMAGE"), "vae": socket("VAE")}, ["LATENT"]),
    "ImageScale": node_class({"image": socket("IMAGE"), "width": SIDE, "height": SIDE}, ["IMAGE"]),
    "Measure": node_class(
        {"image": socket("IMAGE")}, ["INT", "INT"], output_name=["width", "height"]
    ),
    "CreateVideo": node_class(
        {"images": socket("IMAGE"), "fps": ["FLOAT", {"min": 1.0, "max": 120.0}]}, ["VIDEO"]
    ),
    "SaveVideo": node_class({"video": socket("VIDEO"), "filename_prefix": LINE}, is_output=True),
    "TextValue": node_class({"value": TEXT}, ["STRING"]),
    "Number": node_class({"value": ["INT", {}]}, ["INT"]),
    "Flag": node_class({"value": ["BOOLEAN", {}]}, ["BOOLEAN"]),
    "Join": node_class({"a": TEXT, "b": TEXT, "delimiter": LINE}, ["STRING"]),
    "Formula": node_class(
        {"expression": LINE, "a": socket("INT,FLOAT"), "b": socket("INT,FLOAT")}, ["INT"]
    ),
    "Choose": node_class(
        {"switch": ["BOOLEAN", {}], "on_true": MATCHING, "on_false": MATCHING},
        ["COMFY_MATCHTYPE_V3"],
    ),
    "PictureService": node_class(
        {
            "model": ["COMBO", {"options": ["small", "large"]}],
            "prompt": TEXT,
            "negative_prompt": TEXT,
            "system_prompt": TEXT,
            "seed": SEED,
            "width": SIDE,
            "height": SIDE,
            "duration": ["COMBO", {"options": ["5", "10"]}],
        },
        ["IMAGE"],
    ),
    "Speech": node_class({"text": TEXT, "voice": LINE}, ["AUDIO"]),
    "OwnVideoLoader": node_class({"video": [[]]}, ["IMAGE"]),
}


def node(class_name: str, title: str = "", /, **inputs: Any) -> dict[str, Any]:
    meta = {"_meta": {"title": title}} if title else {}
    return {"inputs": inputs, "class_type": class_name, **meta}


def text_to_image() -> dict[str, Any]:
    """The workflow that everyone starts from."""
    return {
        "4": node("CheckpointLoaderSimple", ckpt_name="v1-5.safetensors"),
        "5": node("EmptyLatentImage", width=512, height=512, batch_size=1),
        "6": node("CLIPTextEncode", "Wishes v1.5", text="a cat", clip=["4", 1]),
        "7": node("CLIPTextEncode", "Fears", text="a dog", clip=["4", 1]),
        "3": node(
            "KSampler", "Main sampler", seed=5, steps=20, cfg=8.0, sampler_name="euler", scheduler="normal",
            denoise=1.0, model=["4", 0], positive=["6", 0], negative=["7", 0], latent_image=["5", 0],
        ),
        "8": node("VAEDecode", samples=["3", 0], vae=["4", 2]),
        "9": node("SaveImage", images=["8", 0], filename_prefix="ComfyUI"),
    }  # fmt: skip
