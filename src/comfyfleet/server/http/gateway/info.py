"""ComfyUI's routes for node types, features, models and system statistics."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from comfyfleet import __version__
from comfyfleet.protocol.http import JSON, Route, empty_reply, json_reply, names_etag
from comfyfleet.protocol.server_info import (
    ALONE,
    ASSET_ROUTES,
    FEATURES,
    LOG_ROUTES,
    MODEL_FOLDERS,
    MODEL_FOLDERS_DESCRIBED,
    constant_reply,
    describe_system,
    not_found,
)
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.gateway import files
from comfyfleet.server.gateway.inventory import Inventory, WorkerDevice, largest_device
from comfyfleet.server.gateway.offers import (
    fresh_offer_to,
    object_info_body,
    object_info_of,
    offer_to,
)
from comfyfleet.server.gateway.visible_backends import sees_backends
from comfyfleet.server.http.gateway.app import GatewayCall
from comfyfleet.server.run_log.model import FOLDERS

# Responses are private, because they list the caller's files. Clients revalidate them on each
# request and usually get a 304.
CACHING = {"cache-control": "private, no-cache", "vary": "Accept-Encoding"}


async def get_object_info(call: GatewayCall, request: Request) -> Response:
    body = await object_info_body(call.plane, call.caller)
    etag = f'"{body.etag}"'
    headers = {**CACHING, "etag": etag}
    if names_etag(request.headers.get("if-none-match", ""), etag):
        return Response(b"", 304, headers)
    headers["content-type"] = JSON
    if "gzip" in request.headers.get("accept-encoding", "").lower():
        return Response(await body.zipped(), 200, {**headers, "content-encoding": "gzip"})
    return Response(await body.plain(), 200, headers)


async def get_object_info_of(call: GatewayCall, request: Request) -> Response:
    name = request.path_params["node_class"]
    info = await object_info_of(call.plane, call.caller, name)
    return json_reply({name: info} if info else {})


def features_of(plane: ControlPlane) -> dict[str, Any]:
    changed = {"max_upload_size": plane.settings.max_upload_bytes, "node_replacements": False}
    return {**FEATURES, **changed}


async def get_features(call: GatewayCall, request: Request) -> Response:
    return json_reply(features_of(call.plane))


async def _inventory(call: GatewayCall) -> Inventory:
    offer = await offer_to(call.plane, call.caller)
    return await call.gateway.inventories.get(call.plane, offer.fleets)


async def get_system_stats(call: GatewayCall, request: Request) -> Response:
    inventory = await _inventory(call)
    shown = inventory.devices
    if not sees_backends(call.plane, call.caller.tenant):
        shown = largest_device(shown)
    devices = [_device(index, device) for index, device in enumerate(shown)]
    return json_reply({"system": _system(shown), "devices": devices})


def _system(devices: Sequence[WorkerDevice]) -> dict[str, Any]:
    """Returns the versions and memory of the machine with the largest device."""
    system = describe_system([f"comfyfleet {__version__}"], 0, 0)
    for device in largest_device(devices):
        system |= {"ram_total": device.ram_bytes, "ram_free": device.ram_free_bytes}
        if device.version:
            system["comfyui_version"] = device.version
        if device.system is not None:
            details = device.system.model_dump(mode="json", exclude={"ram_total"})
            system |= {name: value for name, value in details.items() if value not in ("", [])}
    return system


def _device(index: int, device: WorkerDevice) -> dict[str, Any]:
    named = {
        "name": f"cuda:{index} {device.name}" if device.is_gpu else "cpu",
        "type": "cuda" if device.is_gpu else "cpu",
        "index": index if device.is_gpu else None,
    }
    return {
        **named,
        "vram_total": device.memory_bytes,
        "vram_free": device.memory_free_bytes,
        "torch_vram_total": device.memory_bytes,
        "torch_vram_free": device.memory_free_bytes,
    }


async def _models_in(call: GatewayCall, folder: str) -> Sequence[str]:
    offer = await fresh_offer_to(call.plane, call.caller)
    inventory = await call.gateway.inventories.get(call.plane, offer.fleets, fresh=True)
    return inventory.models.get(folder, [])


async def get_models_in(call: GatewayCall, request: Request) -> Response:
    folder = request.path_params["folder"]
    if folder not in MODEL_FOLDERS:
        return empty_reply(404)
    return json_reply(await _models_in(call, folder))


async def get_described_models(call: GatewayCall, request: Request) -> Response:
    folder = request.path_params["folder"]
    if folder not in MODEL_FOLDERS:
        return empty_reply(404)
    names = await _models_in(call, folder)
    return json_reply([{"name": name, "pathIndex": 0} for name in names])


async def get_metadata(call: GatewayCall, request: Request) -> Response:
    return empty_reply(404)


async def get_files(call: GatewayCall, request: Request) -> Response:
    kind = request.path_params["kind"]
    if kind not in FOLDERS:
        return json_reply({"error": "Invalid directory type"}, 400)
    names = await files.list_names(call.plane, call.caller, kind)
    return json_reply([f"{name} [{kind}]" for name in names])


ROUTES = (
    Route("GET", "/object_info", get_object_info),
    Route("GET", "/object_info/{node_class}", get_object_info_of),
    Route("GET", "/features", get_features),
    Route("GET", "/system_stats", get_system_stats),
    Route("GET", "/embeddings", constant_reply([])),
    Route("GET", "/models", constant_reply(MODEL_FOLDERS)),
    Route("GET", "/models/{folder}", get_models_in),
    Route("GET", "/experiment/models", constant_reply(MODEL_FOLDERS_DESCRIBED)),
    Route("GET", "/experiment/models/{folder}", get_described_models),
    Route("GET", "/experiment/models/preview/{folder}/{index}/{file:path}", get_metadata),
    Route("GET", "/view_metadata/{folder}", get_metadata),
    Route("GET", "/extensions", constant_reply([])),
    Route("GET", "/i18n", constant_reply({})),
    Route("GET", "/workflow_templates", constant_reply({})),
    Route("GET", "/global_subgraphs", constant_reply({})),
    Route("GET", "/global_subgraphs/{id}", constant_reply(None)),
    Route("GET", "/node_replacements", constant_reply({})),
    Route("GET", "/manager/version", not_found),
    *LOG_ROUTES,
    *ASSET_ROUTES,
    Route(
        "GET",
        "/internal/folder_paths",
        constant_reply({folder: [] for folder in MODEL_FOLDERS}),
        ALONE,
    ),
    Route("GET", "/internal/files/{kind}", get_files, ALONE),
    Route("GET", "/internal/{rest:path}", not_found, ALONE),
)
