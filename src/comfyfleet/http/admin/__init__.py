"""The operators' API: everything under /api/admin, behind the admin key."""

from comfyfleet.http.admin import (
    audit,
    control,
    dispatches,
    effects,
    fleets,
    jobs,
    tenants,
    upkeep,
    users,
    wallets,
    workers,
    workflows,
)

ROUTERS = tuple(
    module.router
    for module in (
        fleets,
        workflows,
        effects,
        workers,
        tenants,
        users,
        upkeep,
        wallets,
        dispatches,
        jobs,
        control,
        audit,
    )
)
