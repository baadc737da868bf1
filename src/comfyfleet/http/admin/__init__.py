"""The operators' API: everything under /api/admin, behind an operator's key."""

from comfyfleet.http.admin import (
    audit,
    control,
    dispatches,
    effects,
    fleets,
    jobs,
    operators,
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
        operators,
    )
)
