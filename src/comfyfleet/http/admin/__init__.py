"""The operators' API: everything under /api/admin, behind the admin key."""

from collections.abc import Iterator

from fastapi import APIRouter

from comfyfleet.http.admin import audit, fleets, tenants, workers, workflows


def admin_routers() -> Iterator[APIRouter]:
    for module in (fleets, workflows, workers, tenants, audit):
        yield module.router
