"""Models of the list of backends."""

from pydantic import Field

from comfyfleet.api.values import Response


class BackendSeen(Response):
    """A machine, or a whole fleet where machines aren't shown."""

    name: str = Field(
        description="What `backend_affinity` of a graph's node takes.",
        examples=["worker:gpu-7", "fleet:gpus/production"],
    )
    fleet: str = Field(description="SLUG/STAGE")
    is_online: bool = Field(description="Whether it takes jobs now.")
    queue_depth: int = Field(description="Jobs that run there, or that only it may run.")
    device: str | None = Field(default=None, description="The GPU's name; of machines only.")
    memory_total_bytes: int | None = Field(
        default=None, description="Of the GPU; of a fleet's largest. null: not known."
    )
    memory_free_bytes: int | None = None


class Backends(Response):
    backends: tuple[BackendSeen, ...]
    is_whole: bool = Field(default=True, description="False: there are more than the first 500.")
