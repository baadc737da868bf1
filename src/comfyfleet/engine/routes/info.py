"""What the server is and has: nodes, features, figures of the machine; and what it lacks."""

import os
import sys
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from comfyfleet.engine.door import Handler, Route
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.features import (
    COMFYUI_VERSION,
    FEATURES,
    MODEL_FOLDERS,
    NOT_INSTALLED,
    PACKAGES,
)
from comfyfleet.engine.replies import empty, json_reply

PAGE = (
    "<!doctype html><title>comfyfleet engine</title>"
    "<p>A built-in CPU backend that speaks ComfyUI's protocol. It has no editor of its own."
)


async def get_root(engine: Engine, request: Request) -> Response:
    return Response(PAGE, headers={"content-type": "text/html; charset=utf-8"})


async def get_object_info(engine: Engine, request: Request) -> Response:
    described = {name: kind.describe(engine.folders) for name, kind in engine.nodes.items()}
    return json_reply(described)


async def get_object_info_of(engine: Engine, request: Request) -> Response:
    name = request.path_params["node_class"]
    kind = engine.nodes.get(name)
    return json_reply({} if kind is None else {name: kind.describe(engine.folders)})


async def get_system_stats(engine: Engine, request: Request) -> Response:
    total, free = _memory_bytes()
    device = {"name": "cpu", "type": "cpu", "index": None}
    figures = {
        "vram_total": total,
        "vram_free": free,
        "torch_vram_total": total,
        "torch_vram_free": free,
    }
    return json_reply({"system": _system(total, free), "devices": [{**device, **figures}]})


def _system(ram_total: int, ram_free: int) -> dict[str, Any]:
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
        "argv": ["comfyfleet engine"],
    }


def _memory_bytes() -> tuple[int, int]:
    """Total and available memory; without the system's figures, nought."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return kilobytes["MemTotal"] * 1024, kilobytes["MemAvailable"] * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return _physical_memory_bytes(), 0


def _physical_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


async def get_models_in(engine: Engine, request: Request) -> Response:
    return json_reply([]) if request.path_params["folder"] in MODEL_FOLDERS else empty(404)


async def get_metadata(engine: Engine, request: Request) -> Response:
    return empty(404)


def always(body: Any) -> Handler[Any]:
    """A handler for what this server does not have, or always says."""

    async def answer(engine: Engine, request: Request) -> Response:
        return json_reply(body)

    return answer


_MODEL_FOLDERS_DESCRIBED = [
    {"name": name, "folders": [], "extensions": []}
    for name in MODEL_FOLDERS
    if name not in ("configs", "custom_nodes")
]

ROUTES = (
    Route("GET", "/", get_root),
    Route("GET", "/object_info", get_object_info),
    Route("GET", "/object_info/{node_class}", get_object_info_of),
    Route("GET", "/system_stats", get_system_stats),
    Route("GET", "/features", always(FEATURES)),
    Route("GET", "/embeddings", always([])),
    Route("GET", "/models", always(MODEL_FOLDERS)),
    Route("GET", "/models/{folder}", get_models_in),
    Route("GET", "/experiment/models", always(_MODEL_FOLDERS_DESCRIBED)),
    Route("GET", "/experiment/models/{folder}", get_models_in),
    Route("GET", "/view_metadata/{folder}", get_metadata),
    Route("GET", "/extensions", always([])),
    Route("GET", "/i18n", always({})),
    Route("GET", "/workflow_templates", always({})),
    Route("GET", "/global_subgraphs", always({})),
    Route("GET", "/global_subgraphs/{id}", always(None)),
    Route("GET", "/node_replacements", always({})),
)
