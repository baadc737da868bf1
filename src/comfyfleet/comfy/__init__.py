"""Backends: things that execute prompts, behind one interface."""

from comfyfleet.comfy.abilities import Abilities
from comfyfleet.comfy.backend import (
    Backend,
    Cancellation,
    Description,
    Fetched,
    OutputFile,
    Outputs,
    OutputValue,
    Prompt,
    Submitted,
    Uploaded,
)
from comfyfleet.comfy.cloud import CloudSettings, ComfyCloud, cloud_settings
from comfyfleet.comfy.meter import Meter, Tally
from comfyfleet.comfy.refusals import NodeProblem
from comfyfleet.comfy.server import ComfyServer
from comfyfleet.comfy.settings import Limits, ServerSettings, server_settings

__all__ = [
    "Abilities",
    "Backend",
    "Cancellation",
    "CloudSettings",
    "ComfyCloud",
    "ComfyServer",
    "Description",
    "Fetched",
    "Limits",
    "Meter",
    "NodeProblem",
    "OutputFile",
    "OutputValue",
    "Outputs",
    "Prompt",
    "ServerSettings",
    "Submitted",
    "Tally",
    "Uploaded",
    "cloud_settings",
    "server_settings",
]
