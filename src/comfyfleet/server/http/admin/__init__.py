"""The operators' API: everything under /api/admin, behind an operator's key.

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
