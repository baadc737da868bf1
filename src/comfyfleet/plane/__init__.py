"""The control plane put together: databases, store, queue and jobs, from settings."""

from comfyfleet.plane.meters import Meters
from comfyfleet.plane.model import Plane
from comfyfleet.plane.opening import open_plane

__all__ = ["Meters", "Plane", "open_plane"]
