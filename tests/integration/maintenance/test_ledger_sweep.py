"""Books that don't add up are told once and loudly; books that do, never."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import update
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import FleetSetup, fleet_setup_on
from tests.support.server.tenants import TenantData, customer_of

from comfyfleet.server.db.tenant_tables import ai_jobs, token_wallets
from comfyfleet.server.jobs import submit
from comfyfleet.server.maintenance.sweeps import check_ledger


@pytest.fixture
async def fleet_setup(databases: Databases, tmp_path: Path) -> AsyncIterator[FleetSetup]:
    async with plane_on(databases, tmp_path) as plane, fleet_setup_on(plane) as fleet_setup:
        yield fleet_setup


@pytest.fixture
async def payer(fleet_setup: FleetSetup) -> TenantData:
    customer = await customer_of(fleet_setup.plane, fleet_setup.admin)
    await customer.pays(100)
    return customer


async def test_sound_books_are_no_news(fleet_setup: FleetSetup, payer: TenantData) -> None:
    file = await payer.file()
    await payer.job(file, price=7)
    ended = await payer.job(file, price=8)
    await submit.cancel_job(fleet_setup.plane.context, payer.tenant_id, ended.id)
    await check_ledger(fleet_setup.plane)
    books = (await fleet_setup.admin.get("/api/admin/ledger")).json()
    assert books == {"is_sound": True, "found": 0, "drifts": [], "pools_left_out": []}
    assert await fleet_setup.audited("ledger_drift") == []


async def test_a_wallet_that_is_not_its_sum_is_told_once(
    fleet_setup: FleetSetup, payer: TenantData, caplog: pytest.LogCaptureFixture
) -> None:
    async with payer.pool.transaction() as tx:
        await tx.execute(update(token_wallets).values(balance=150))
    with caplog.at_level(logging.ERROR):
        await check_ledger(fleet_setup.plane)
        await check_ledger(fleet_setup.plane)
    assert str(payer.tenant_id) in caplog.text
    (entry,) = await fleet_setup.audited("ledger_drift")
    assert entry["details"]["fault"] == "balance"
    metrics = (await fleet_setup.admin.get("/metrics")).text
    assert "comfyfleet_ledger_drifts 1.0" in metrics
    params = {"tenant_id": str(payer.tenant_id)}
    books = (await fleet_setup.admin.get("/api/admin/ledger", params=params)).json()
    assert (books["is_sound"], books["drifts"][0]["user_id"]) == (False, str(payer.user_id))


async def test_a_job_that_ended_and_was_not_settled_is_found(
    fleet_setup: FleetSetup, payer: TenantData
) -> None:
    job = await payer.job(await payer.file(), price=7)
    async with payer.pool.transaction() as tx:
        await tx.execute(update(ai_jobs).values(status="failed"))
    books = (await fleet_setup.admin.get("/api/admin/ledger")).json()
    (drift,) = books["drifts"]
    assert (drift["fault"], drift["job_id"]) == ("not_settled", str(job.id))
