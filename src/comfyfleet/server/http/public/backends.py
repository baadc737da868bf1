"""The route that lists the backends on which a customer's jobs may run."""

from comfyfleet.api.backends import Backends
from comfyfleet.server.gateway.visible_backends import visible_backends
from comfyfleet.server.http.deps import PlaneDep
from comfyfleet.server.http.public.auth import Reader, public_router

router = public_router("graphs")


@router.get("/backends", name="backends")
async def list_backends(plane: PlaneDep, caller: Reader) -> Backends:
    """Lists the backends on which your jobs may run, with their state, queue and memory. If the
    operator hides machines, fleets are listed instead."""
    return await visible_backends(plane, caller)
