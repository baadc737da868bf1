"""Other users of the machine, careless operators, and addresses inside our own network."""

import asyncio
import os
import re
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.commands import comfyfleet
from tests.support.server.control_plane import ADMIN_KEY, plane_on
from tests.support.server.customers import EffectSetup, effect_setup_on

import comfyfleet as package
from comfyfleet.clock import utc_now
from comfyfleet.server.app import ControlPlane, open_control_plane
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.notifications import webhooks
from comfyfleet.server.notifications.model import EndOfJob, WebhookEvent
from comfyfleet.server.storage import LocalStore
from comfyfleet.settings import Settings, misspelt
from comfyfleet.transport.fetch import PublicHttpClient

SOURCE = Path(package.__file__).parent


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> list[Path]:
    return [
        each
        for each in (folder, *folder.rglob("*"))
        if stat.S_IMODE(each.stat().st_mode) & 0o077
    ]  # fmt: skip


async def opened_and_used(data: Path) -> None:
    async with open_control_plane(Settings(), data, utc_now) as plane:
        assert isinstance(plane.store, LocalStore)
        async with plane.store.receiving("a/b", "text/plain") as incoming:
            await incoming.write(b"secret")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no modes")
async def test_nothing_in_the_data_folder_is_open_to_other_users(
    tmp_path: Path, usual_umask: None
) -> None:
    data = tmp_path / "data"
    await _in_thread("db", "upgrade", "--data", str(data))
    await opened_and_used(data)
    assert len(list(data.rglob("*.sqlite3"))) == 2
    assert open_to_others(data) == []


def test_a_folder_that_is_open_to_others_is_warned_of(tmp_path: Path, usual_umask: None) -> None:
    tmp_path.chmod(0o755)
    said = comfyfleet("db", "upgrade", "--data", str(tmp_path)).err
    assert f"chmod 700 {tmp_path}" in said


@pytest.mark.parametrize("command", ["serve", "up"])
def test_a_short_admin_key_is_refused_where_others_can_reach_it(
    tmp_path: Path, command: str
) -> None:
    refused = comfyfleet(
        *(command, "--host", "192.0.2.7", "--port", "0", "--data", str(tmp_path / "data")),
        environ={"COMFYFLEET_ADMIN_KEY": "short", "COMFYFLEET_LEASE_SECOND": "9"},
    )
    assert refused.code == 1
    assert "COMFYFLEET_ADMIN_KEY has fewer than 16 characters, and 192.0.2.7 can be" in refused.err
    assert (
        "COMFYFLEET_LEASE_SECOND is not a known setting; did you mean COMFYFLEET_LEASE_SECONDS?"
        in (refused.err)
    )
    assert not (tmp_path / "data").exists()


def test_a_misspelt_variable_is_found_and_a_stranger_let_be() -> None:
    environ = {
        "COMFYFLEET_RETENTON_DAYS": "3",
        "COMFYFLEET_FLEET_SECRT": "x",
        "COMFYFLEET_GRAFANA_DASHBOARD": "of others",
        "COMFYFLEET_KEY": "ours",
        "RETENTON_DAYS": "",
    }
    assert misspelt(environ) == {
        "COMFYFLEET_RETENTON_DAYS": "COMFYFLEET_RETENTION_DAYS",
        "COMFYFLEET_FLEET_SECRT": "COMFYFLEET_FLEET_SECRET",
    }


def test_every_variable_that_we_read_is_known() -> None:
    text = "".join(path.read_text("utf-8") for path in SOURCE.rglob("*.py"))
    read = set(re.findall(r"\bCOMFYFLEET_[A-Z_]+[A-Z]\b", text))
    assert misspelt(dict.fromkeys(read, "")) == {}


async def resolved_inside(host: str, _port: int) -> list[str]:
    return {"inside.example": ["10.0.0.7"], "shop.example": ["93.184.216.34"]}.get(host, [])


@pytest.fixture
async def effect_setup(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[EffectSetup]:
    outward = PublicHttpClient(resolver=resolved_inside)
    async with (
        plane_on(sqlite_databases, tmp_path) as plane,
        effect_setup_on(replace(plane, outward=outward)) as effect_setup,
    ):
        yield effect_setup
    await outward.aclose()


async def test_a_webhook_into_our_own_network_is_refused_when_it_is_made(
    effect_setup: EffectSetup,
) -> None:
    ada = await effect_setup.customer()
    for url, status in (
        ("https://10.0.0.1/", 422),
        ("http://169.254.169.254/latest", 422),
        ("https://[::1]/", 422),
        ("https://inside.example/hook", 422),
        ("https://not-yet.example/hook", 201),
        ("https://shop.example/hook", 201),
    ):
        made = await ada.client.post("/api/webhooks", json={"url": url})
        assert made.status_code == status, (url, made.text)


async def test_new_url_secret_makes_every_url_void(tmp_path: Path, usual_umask: None) -> None:
    settings = Settings(admin_key=ADMIN_KEY)

    async def signed(plane: ControlPlane) -> str:
        assert isinstance(plane.store, LocalStore)
        return (await plane.store.url_to_put("a", content_type="text/plain", seconds=9)).url

    async with open_control_plane(settings, tmp_path, lambda: _NOW) as plane:
        before, again = await signed(plane), await signed(plane)
    assert before == again
    said = await _in_thread("db", "new-url-secret", "--data", str(tmp_path))
    assert "all file URLs become invalid" in said
    async with open_control_plane(settings, tmp_path, lambda: _NOW) as plane:
        assert await signed(plane) != before


async def test_new_webhook_key_gives_every_webhook_another_secret(
    tmp_path: Path, usual_umask: None
) -> None:
    settings = Settings(admin_key=ADMIN_KEY)
    async with open_control_plane(settings, tmp_path, lambda: _NOW) as plane:
        before = plane.webhook_key
    said = await _in_thread("db", "new-webhook-key", "--data", str(tmp_path))
    assert "new secrets at the next start" in said
    async with open_control_plane(settings, tmp_path, lambda: _NOW) as plane:
        assert plane.webhook_key != before
        async with plane.central.read() as tx:
            assert await notifications.find_audit_entries(
                tx, action="webhook_key_replaced", limit=1
            )


_NOW = utc_now()


async def _in_thread(*arguments: str) -> str:
    return (await asyncio.to_thread(comfyfleet, *arguments)).err


async def test_tenants_take_turns_at_deliveries(
    sqlite_databases: Databases, tmp_path: Path
) -> None:
    async with plane_on(sqlite_databases, tmp_path) as plane:
        pool, now = plane.pools["main"], plane.clock()
        owners = [(uuid4(), uuid4()) for _ in range(2)]
        async with pool.transaction() as tx:
            for (tenant_id, user_id), count in zip(owners, (30, 2), strict=True):
                await webhooks.create_webhook(
                    tx,
                    webhook_id=uuid4(),
                    tenant_id=tenant_id,
                    user_id=user_id,
                    url="https://shop.example/hook",
                    events=list(WebhookEvent),
                    now=now,
                )
                for number in range(count):
                    at = now + timedelta(seconds=number + (60 if count == 2 else 0))
                    await webhooks.enqueue(
                        tx,
                        tenant_id,
                        user_id,
                        EndOfJob(uuid4(), WebhookEvent.COMPLETED, {}),
                        new_id=uuid4,
                        now=at,
                    )
        async with pool.transaction() as tx:
            due = await webhooks.take_due_deliveries(tx, now=now + timedelta(hours=1), limit=4)
    assert [each.tenant_id for each, _ in due].count(owners[1][0]) == 2
