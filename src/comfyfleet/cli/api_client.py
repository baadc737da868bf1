"""The names by which `graph` and `pipeline` call a control plane."""

from typing import TypeAlias

from comfyfleet.cli.control_plane import API_DEFAULTS, PUBLIC_BASE, ApiOptions, ApiSession, connect
from comfyfleet.cli.job_waiter import live_display, retry_while_away

__all__ = [
    "API_DEFAULTS",
    "PUBLIC_BASE",
    "ApiClient",
    "ApiOptions",
    "control",
    "live_display",
    "retry_while_away",
]
ApiClient: TypeAlias = ApiSession
control = connect
