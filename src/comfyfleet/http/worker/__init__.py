"""The workers' side: seven endpoints under /api/worker."""

from comfyfleet.http.worker.auth import stranger_joining, worker_calling
from comfyfleet.http.worker.routes import CALLED_OFTEN, router

__all__ = ["CALLED_OFTEN", "router", "stranger_joining", "worker_calling"]
