"""Route for the backends that a customer's jobs may run on."""

from comfyfleet.api.backends import Backends
from comfyfleet.server.gateway.visible_backends import visible_backends
from comfyfleet.server.http.deps import PlaneDep
from comfyfleet.server.http.public.auth import Reader, public_router

router = public_router("graphs")


@router.get("/backends", name="backends")
async def list_backends(plane: PlaneDep, caller: Reader) -> Backends:
    """Lists the backends that your jobs may run on, with their state, queue and memory. If machines
    are hidden, fleets are listed instead."""
    return await visible_backends(plane, caller)
