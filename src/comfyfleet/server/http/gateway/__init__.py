"""The gateway, which offers ComfyUI's API and Comfy API v2 for all fleets.

Internal: may change without notice.
"""

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http.gateway import (
    files,
    info,
    prompts,
    sockets,
    userdata,
    v2,
    v2_assets,
)
from comfyfleet.server.http.gateway.app import Gateway, GatewayRouter
from comfyfleet.server.http.gateway.app import GatewayRoutes as GatewayRoutes
from comfyfleet.server.http.gateway.auth import KeyInPath as KeyInPath
from comfyfleet.server.http.gateway.editor import Editor, EditorRouter, installed_files
from comfyfleet.server.http.gateway.editor import EditorRoutes as EditorRoutes
from comfyfleet.server.http.gateway.templates import installed_templates
from comfyfleet.server.http.local_access import LocalAccess

ROUTES = (
    *prompts.ROUTES,
    *files.ROUTES,
    *info.ROUTES,
    *userdata.ROUTES,
    *v2.ROUTES,
    *v2_assets.ROUTES,
)


def gateway_router(plane: ControlPlane, local: LocalAccess | None = None) -> GatewayRouter:
    """Creates the gateway's router. With `local`, programs on this machine need no key."""
    return GatewayRouter(Gateway(plane, local), ROUTES, sockets.SOCKETS)


def editor_router(router: GatewayRouter) -> EditorRouter:
    return EditorRouter(Editor(router, installed_files(), installed_templates()))
