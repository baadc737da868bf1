"""Which node types programs of the machine of `up` may use."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on

from comfyfleet.api.admin import FleetPrompts, TenantPrompts
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.gateway.policy import COMPUTING, DENIED, policy_of
from comfyfleet.server.maintenance.embedded_fleet import (
    LOCAL_TENANT,
    allow_computing_nodes,
    local_user_key,
)
from comfyfleet.server.tenants import service as tenants

FLEET = FleetPrompts(allows_unknown=True)


@pytest.fixture
async def plane(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with plane_on(sqlite_databases, tmp_path) as plane:
        await local_user_key(plane, tmp_path)
        yield plane


async def local_prompts(plane: ControlPlane) -> TenantPrompts:
    async with plane.central.read() as tx:
        return (await tenants.get_tenant(tx, LOCAL_TENANT)).prompts


async def test_nodes_that_only_compute_are_for_the_local_user_alone(plane: ControlPlane) -> None:
    await allow_computing_nodes(plane)
    local = policy_of(FLEET, await local_prompts(plane))
    other = policy_of(FLEET, TenantPrompts())
    assert set(COMPUTING) <= DENIED.keys()
    for name in COMPUTING:
        assert local.refusal(name, {}) is None
        assert other.refusal(name, {}) is not None
    assert local.refusal("LoadLatent", {}) is not None


async def test_what_an_operator_has_set_stays(plane: ControlPlane) -> None:
    async with plane.central.transaction() as tx:
        await tenants.set_prompts(tx, LOCAL_TENANT, TenantPrompts(deny=("Regex*",)))
    await allow_computing_nodes(plane)
    assert await local_prompts(plane) == TenantPrompts(deny=("Regex*",))
