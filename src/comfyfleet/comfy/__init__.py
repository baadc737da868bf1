"""Backends: servers that execute prompts, behind one interface. These are a ComfyUI server, and
Comfy Cloud via its API v1 or v2.

Internal: may change without notice.
"""

from comfyfleet.comfy.answers import NodeProblem
from comfyfleet.comfy.backend import (
    Backend,
    BackendAbilities,
    BackendLimits,
    Cancellation,
    CloudSettings,
    Description,
    Fetched,
    OutputFile,
    Outputs,
    OutputValue,
    Prompt,
    ServerSettings,
    Submitted,
    Uploaded,
    cloud_settings,
)
from comfyfleet.comfy.calls import CallMeter, CallTally
from comfyfleet.comfy.cloud import ComfyCloud
from comfyfleet.comfy.server import ComfyServer

__all__ = [
    "Backend",
    "BackendAbilities",
    "BackendLimits",
    "CallMeter",
    "CallTally",
    "Cancellation",
    "CloudSettings",
    "ComfyCloud",
    "ComfyServer",
    "Description",
    "Fetched",
    "NodeProblem",
    "OutputFile",
    "OutputValue",
    "Outputs",
    "Prompt",
    "ServerSettings",
    "Submitted",
    "Uploaded",
    "cloud_settings",
]
