"""The operators' API: everything under /api/admin, behind the admin key."""

from comfyfleet.http.admin import (
    audit,
    control,
    dispatches,
    fleets,
    jobs,
    tenants,
    workers,
    workflows,
)

ROUTERS = tuple(
    module.router
    for module in (fleets, workflows, workers, tenants, dispatches, jobs, control, audit)
)
