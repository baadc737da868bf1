"""ComfyUI's routes about the server: node types, features, figures."""

from starlette.requests import Request
from starlette.responses import Response

from comfyfleet import __version__
from comfyfleet.protocol.http import BODY_BYTES_MAX, Route, json_reply
from comfyfleet.server.gateway.offers import offer_to
from comfyfleet.server.http.gateway.app import GatewayCall

COMFYUI_VERSION = "0.28.0"
FEATURES = {
    "supports_preview_metadata": True,
    "supports_model_type_tags": True,
    "max_upload_size": BODY_BYTES_MAX,
    "extension": {"manager": {"supports_v4": True}},
    "node_replacements": True,
    "assets": False,
}


async def get_object_info(call: GatewayCall, request: Request) -> Response:
    offer = await offer_to(call.plane, call.caller)
    return json_reply(dict(offer.object_info))


async def get_object_info_of(call: GatewayCall, request: Request) -> Response:
    name = request.path_params["node_class"]
    offer = await offer_to(call.plane, call.caller)
    return json_reply({name: offer.object_info[name]} if name in offer.object_info else {})


async def get_features(call: GatewayCall, request: Request) -> Response:
    return json_reply(FEATURES)


async def get_system_stats(call: GatewayCall, request: Request) -> Response:
    system = {
        "os": "posix",
        "comfyui_version": COMFYUI_VERSION,
        "argv": [f"comfyfleet {__version__}"],
    }
    return json_reply({"system": system, "devices": []})


ROUTES = (
    Route("GET", "/object_info", get_object_info),
    Route("GET", "/object_info/{node_class}", get_object_info_of),
    Route("GET", "/features", get_features),
    Route("GET", "/system_stats", get_system_stats),
)
