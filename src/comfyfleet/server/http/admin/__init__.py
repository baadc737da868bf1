"""The operators' API under /api/admin, which requires an operator's key.

Internal: may change without notice.
"""

from comfyfleet.server.http.admin import catalog, fleets, jobs, operators, overview, tenants

ROUTERS = (
    fleets.router,
    catalog.router,
    tenants.router,
    jobs.dispatches_router,
    jobs.router,
    overview.router,
    operators.router,
    operators.operators_router,
)
