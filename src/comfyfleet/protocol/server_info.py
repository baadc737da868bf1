"""The information that a ComfyUI server provides about itself, for the engine and the gateway:
version, features, names of model folders, and an empty log."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from comfyfleet.protocol.http import (
    BODY_BYTES_MAX,
    Handler,
    Route,
    empty_reply,
    json_reply,
    read_json,
    text_reply,
)
from comfyfleet.protocol.payloads import MalformedBody

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

# Packages whose versions ComfyUI lists in its system statistics. The engine contains none of them.
PACKAGES = (
    "comfyui-frontend-package",
    "comfyui-workflow-templates",
    "comfyui-embedded-docs",
    "comfy-kitchen",
    "comfy-aimdo",
)
NOT_INSTALLED = "0.0.0"

MODEL_FOLDERS_DESCRIBED = [
    {"name": name, "folders": [], "extensions": []}
    for name in MODEL_FOLDERS
    if name not in ("configs", "custom_nodes")
]


def describe_system(argv: Sequence[str], ram_total: int, ram_free: int) -> dict[str, Any]:
    packages = [
        {"name": name, "installed": NOT_INSTALLED, "required": NOT_INSTALLED} for name in PACKAGES
    ]
    return {
        "os": sys.platform,
        "ram_total": ram_total,
        "ram_free": ram_free,
        "comfyui_version": COMFYUI_VERSION,
        "required_frontend_version": NOT_INSTALLED,
        "installed_templates_version": NOT_INSTALLED,
        "required_templates_version": NOT_INSTALLED,
        "comfy_package_versions": packages,
        "python_version": sys.version,
        "pytorch_version": NOT_INSTALLED,
        "embedded_python": False,
        "deploy_environment": "local-git",
        "argv": list(argv),
    }


def constant_reply(body: Any) -> Handler[Any]:
    """Returns a handler with a constant response, for features that this server lacks."""

    async def answer(served: object, request: Request) -> Response:
        return json_reply(body)

    return answer


TERMINAL_COLUMNS, TERMINAL_ROWS = 80, 24
ALONE = ("",)


async def get_logs(served: object, request: Request) -> Response:
    return json_reply("")


async def get_raw_logs(served: object, request: Request) -> Response:
    size = {"cols": TERMINAL_COLUMNS, "rows": TERMINAL_ROWS}
    return json_reply({"entries": [], "size": size})


async def subscribe_logs(served: object, request: Request) -> Response:
    body = await read_json(request)
    if not isinstance(body, dict) or not {"clientId", "enabled"} <= body.keys():
        raise MalformedBody("clientId and enabled are expected")
    return empty_reply()


async def not_found(served: object, request: Request) -> Response:
    return text_reply("404: Not Found", 404)


ASSETS_DISABLED: Mapping[str, Any] = {
    "error": {
        "code": "SERVICE_DISABLED",
        "message": "Assets system is disabled. Start the server with --enable-assets to use this "
        "feature.",
        "details": {},
    }
}
ASSETS = "/api/assets"


async def refuse_assets(served: object, request: Request) -> Response:
    """Responds like a ComfyUI without `--enable-assets`."""
    asset_id = request.path_params.get("id")
    if asset_id is not None and not _UUID.fullmatch(asset_id):
        return text_reply("404: Not Found", 404)
    return json_reply(ASSETS_DISABLED, 503)


_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

ASSET_ROUTES: tuple[Route[Any], ...] = tuple(
    Route(method, path, refuse_assets, ALONE)
    for method, path in (
        ("GET", ASSETS),
        ("POST", ASSETS),
        ("POST", f"{ASSETS}/from-hash"),
        ("HEAD", f"{ASSETS}/hash/{{hash}}"),
        ("POST", f"{ASSETS}/prune"),
        ("POST", f"{ASSETS}/seed"),
        ("POST", f"{ASSETS}/seed/cancel"),
        ("GET", f"{ASSETS}/seed/status"),
        ("GET", f"{ASSETS}/tags/refine"),
        ("GET", f"{ASSETS}/{{id}}"),
        ("PUT", f"{ASSETS}/{{id}}"),
        ("DELETE", f"{ASSETS}/{{id}}"),
        ("GET", f"{ASSETS}/{{id}}/content"),
        ("POST", f"{ASSETS}/{{id}}/tags"),
        ("DELETE", f"{ASSETS}/{{id}}/tags"),
        ("GET", "/api/tags"),
    )
)

LOG_ROUTES: tuple[Route[Any], ...] = (
    Route("GET", "/internal/logs", get_logs, ALONE),
    Route("GET", "/internal/logs/raw", get_raw_logs, ALONE),
    Route("PATCH", "/internal/logs/subscribe", subscribe_logs, ALONE),
)
