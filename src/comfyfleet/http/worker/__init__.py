"""The workers' side: seven endpoints under /api/worker."""

from comfyfleet.http.worker.routes import router

__all__ = ["router"]
