"""What the engine says it is: a ComfyUI of this version, without models and without an editor."""

from collections.abc import Mapping
from typing import Any

from comfyfleet.engine.requests import BODY_BYTES_MAX

COMFYUI_VERSION = "0.28.0"

FEATURES: Mapping[str, Any] = {
    "supports_preview_metadata": True,
    "supports_model_type_tags": True,
    "max_upload_size": BODY_BYTES_MAX,
    "extension": {"manager": {"supports_v4": True}},
    "node_replacements": True,
    "assets": False,
}

MODEL_FOLDERS = (
    "checkpoints",
    "configs",
    "loras",
    "vae",
    "text_encoders",
    "diffusion_models",
    "clip_vision",
    "style_models",
    "embeddings",
    "diffusers",
    "vae_approx",
    "controlnet",
    "gligen",
    "upscale_models",
    "latent_upscale_models",
    "custom_nodes",
    "hypernetworks",
    "photomaker",
    "classifiers",
    "model_patches",
    "audio_encoders",
    "background_removal",
    "frame_interpolation",
    "geometry_estimation",
    "optical_flow",
    "detection",
)

# Packages that a ComfyUI names in its system statistics; none of them is part of the engine.
PACKAGES = (
    "comfyui-frontend-package",
    "comfyui-workflow-templates",
    "comfyui-embedded-docs",
    "comfy-kitchen",
    "comfy-aimdo",
)
NOT_INSTALLED = "0.0.0"
