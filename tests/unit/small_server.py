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
