"""Comfy Cloud, API v1 and v2, behind one backend."""

from comfyfleet.comfy.cloud.cloud import ComfyCloud
from comfyfleet.comfy.cloud.settings import CloudSettings, cloud_settings

__all__ = ["CloudSettings", "ComfyCloud", "cloud_settings"]
