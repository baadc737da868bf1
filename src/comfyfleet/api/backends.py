"""Models for the list of backends."""

from pydantic import Field

from comfyfleet.api.values import Response


class BackendSeen(Response):
    """A worker's backend, or a whole fleet if individual machines aren't shown."""

    name: str = Field(
        description="The value for `backend_affinity` of a graph's node.",
        examples=["worker:gpu-7", "fleet:gpus/production"],
    )
    fleet: str = Field(description="The backend's fleet, as SLUG/STAGE.")
    is_online: bool = Field(description="Whether the backend accepts jobs now.")
    queue_depth: int = Field(
        description="Number of jobs that are running on the backend, plus queued jobs that only "
        "this backend may run."
    )
    device: str | None = Field(default=None, description="The GPU's name; only for machines.")
    memory_total_bytes: int | None = Field(
        default=None,
        description="Memory of the GPU; for a fleet, of its largest GPU. null if unknown.",
    )
    memory_free_bytes: int | None = None


class Backends(Response):
    backends: tuple[BackendSeen, ...]
    is_whole: bool = Field(
        default=True, description="false if the list is limited to the first 500 backends."
    )
