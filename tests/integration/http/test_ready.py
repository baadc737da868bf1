"""Alive and ready, on both databases."""

import asyncio
import errno
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy.engine import make_url
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import ADMIN_KEY, at_once, client_of, plane_on

from comfyfleet.clock import utc_now
from comfyfleet.errors import Refused, StoreFull, Unavailable
from comfyfleet.server.app import open_control_plane
from comfyfleet.server.db import Database, Pools, Tx, open_database
from comfyfleet.server.db.outages import outage_logger
from comfyfleet.server.http import health
from comfyfleet.server.http.health import CENTRAL
from comfyfleet.server.storage import LocalStore, outage
from comfyfleet.settings import Settings


async def test_a_control_plane_on_its_databases_is_ready(
    databases: Databases, tmp_path: Path
) -> None:
    async with plane_on(databases, tmp_path) as plane, client_of(plane, key=None) as client:
        assert (await client.get("/healthz")).json()["status"] == "ok"
        answer = await client.get("/readyz")
        assert answer.status_code == 200, answer.text
        assert set(answer.json()["checks"].values()) == {"ok"}


async def test_a_schema_of_another_version_is_refused_with_the_way_out(
    databases: Databases, tmp_path: Path
) -> None:
    # The wrong history stands for a database that was never brought up to date.
    settings = Settings(
        central_database_url=await databases.url("tenant"),
        tenant_database_urls=f"main={await databases.url('tenant')}",
    )
    with pytest.raises(Refused) as caught:
        async with open_control_plane(settings, tmp_path, utc_now):
            pass
    assert caught.value.details["hint"] == "comfyfleet db upgrade"


async def test_the_embedded_databases_are_migrated_and_keep_their_keys(tmp_path: Path) -> None:
    async with open_control_plane(Settings(), tmp_path, utc_now) as first:
        made = first.admin_key.just_made
        assert made
        async with client_of(first, key=made) as client:
            assert (await client.get("/readyz")).status_code == 200
    assert (tmp_path / "central.sqlite3").exists()
    async with open_control_plane(Settings(), tmp_path, utc_now) as again:
        assert again.admin_key.just_made is None
        assert again.admin_key.key_hash == first.admin_key.key_hash
    async with open_control_plane(Settings(admin_key=ADMIN_KEY), tmp_path, utc_now) as other:
        assert other.admin_key.key_hash != first.admin_key.key_hash
    assert made not in (tmp_path / "central.sqlite3").read_bytes().decode("latin-1")


async def test_a_second_control_plane_on_sqlite_is_refused(tmp_path: Path) -> None:
    async with open_control_plane(Settings(), tmp_path, utc_now):
        with pytest.raises(Refused, match="only one control plane"):
            async with open_control_plane(Settings(), tmp_path, utc_now):
                pass
    async with open_control_plane(Settings(), tmp_path, utc_now):
        pass  # free again


async def test_a_database_that_went_away_is_seen(databases: Databases, tmp_path: Path) -> None:
    async with plane_on(databases, tmp_path) as plane, client_of(plane) as client:
        object.__setattr__(plane, "central", open_database(f"sqlite:///{tmp_path}/none/x"))
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["checks"]["central"] != "ok"
        assert answer.json()["checks"]["pool main"] == "ok"


async def test_a_pool_that_is_down_is_told_and_takes_no_control_plane_away(
    databases: Databases, tmp_path: Path
) -> None:
    async with plane_on(databases, tmp_path) as plane, client_of(plane) as client:
        away = Pools({"main": plane.pools["main"], "b": open_database(f"sqlite:///{tmp_path}/n/x")})
        object.__setattr__(plane, "pools", away)
        answer = await client.get("/readyz")
    assert answer.status_code == 200, "a load balancer would take every control plane away"
    assert answer.json()["status"] == "degraded"
    checks = answer.json()["checks"]
    assert (checks["central"], checks["pool main"]) == ("ok", "ok")
    assert checks["pool b"] != "ok"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StoreFull("the disk is full"), "store_full"),
        (Unavailable("S3 answered InternalError"), "store_not_writable"),
    ],
)
async def test_a_store_that_can_only_be_read_takes_no_control_plane_away(
    sqlite_databases: Databases,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Unavailable,
    code: str,
) -> None:
    monkeypatch.setattr(outage, "SETTLE_SECONDS", 0.0)
    names = ("comfyfleet_store_full", "comfyfleet_store_not_writable")

    def metrics() -> tuple[float | None, ...]:
        return tuple(plane.meters.registry.get_sample_value(name) for name in names)

    async with plane_on(sqlite_databases, tmp_path) as plane, client_of(plane) as client:
        plane.store.outage.note_failure(error)
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "check", at_once)  # as of a bucket, which is only read
            answer = await client.get("/readyz")
        assert answer.status_code == 200, "a load balancer would take every control plane away"
        assert answer.json()["status"] == "degraded"
        assert answer.json()["checks"]["store"] == code
        assert metrics() == (float(code == "store_full"), 1.0)
        await plane.store.check()  # writes
        assert metrics() == (0.0, 0.0)
        assert (await client.get("/readyz")).json()["status"] == "ready"


async def test_a_full_folder_is_named_by_its_own_check(
    sqlite_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with plane_on(sqlite_databases, tmp_path) as plane, client_of(plane) as client:
        monkeypatch.setattr(Path, "open", fill)
        answer = await client.get("/readyz")
    assert (answer.status_code, answer.json()["checks"]["store"]) == (200, "store_full")


async def test_a_store_that_is_away_makes_it_not_ready(
    sqlite_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: LocalStore) -> None:
        raise Unavailable("the folder is gone")

    async with plane_on(sqlite_databases, tmp_path) as plane, client_of(plane) as client:
        monkeypatch.setattr(LocalStore, "check", fail)
        assert (await client.get("/readyz")).status_code == 503


async def test_a_control_plane_starts_while_a_pool_is_down(
    postgres_databases: Databases, tmp_path: Path
) -> None:
    down = await postgres_databases.url("tenant")
    name, server = make_url(down).database, postgres_databases.server_url
    assert server
    pools = f"main={await postgres_databases.url('tenant')},b={down}"
    connection = await asyncpg.connect(server)
    try:
        await connection.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        async with (
            plane_on(postgres_databases, tmp_path, tenant_database_urls=pools) as plane,
            client_of(plane) as client,
        ):
            assert (await client.get("/readyz")).json()["status"] == "degraded"
            await connection.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
            assert (await client.get("/readyz")).json()["status"] == "ready"
    finally:
        await connection.close()


async def test_health_and_metrics_are_made_at_a_limited_rate(
    sqlite_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Counter[str] = Counter()

    async def check(*_: object) -> dict[str, str]:
        made["checks"] += 1
        return {"store": "ok", "central": "ok"}

    async def render(*_: object) -> bytes:
        made["metrics"] += 1
        return b"figures"

    monkeypatch.setattr(health, "_check_all", check)
    monkeypatch.setattr(health, "_render", render)
    for name in ("READY_SECONDS", "SCRAPE_SECONDS"):
        monkeypatch.setattr(health, name, 3600.0)
    async with plane_on(sqlite_databases, tmp_path) as plane, client_of(plane) as client:
        for _ in range(3 * health.AT_ONCE):
            assert (await client.get("/readyz")).status_code == 200
            assert (await client.get("/metrics")).text == "figures"
    assert made == {"checks": health.AT_ONCE, "metrics": health.AT_ONCE}


def test_an_outage_is_seen_within_two_seconds() -> None:
    assert health.CHECK_SECONDS_MAX + health.READY_SECONDS < 2


def told(caplog: pytest.LogCaptureFixture, logger: logging.Logger) -> list[str]:
    """Returns the warnings of a logger."""
    return [
        each.getMessage()
        for each in caplog.records
        if each.name == logger.name and each.levelno >= logging.WARNING
    ]


async def test_an_outage_that_is_logged_already_adds_no_line(
    sqlite_databases: Databases, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with plane_on(sqlite_databases, tmp_path) as plane, client_of(plane) as client:
        object.__setattr__(plane, "central", open_database(f"sqlite:///{tmp_path}/none/x"))
        for _ in range(3):
            assert (await client.get("/readyz")).status_code == 503
        (line,) = told(caplog, outage_logger)
    assert "is unavailable" in line
    assert told(caplog, health.logger) == []


async def test_a_database_that_does_not_answer_is_one_outage_in_the_log(
    sqlite_databases: Databases,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def hang(_: object, history: str) -> None:
        if history == "central":
            await asyncio.Event().wait()

    async with plane_on(sqlite_databases, tmp_path) as plane, client_of(plane) as client:
        with monkeypatch.context() as patch:
            patch.setattr(health, "require_newest_schema", hang)
            patch.setattr(health, "CHECK_SECONDS_MAX", 0.05)
            for _ in range(2):
                assert (await client.get("/readyz")).status_code == 503
        monkeypatch.setattr(health, "CHECK_SECONDS_MAX", 60.0)
        assert (await client.get("/readyz")).status_code == 200
        plane.central.outages.close()  # its end would else be logged a few seconds later
        name = plane.central.name
    assert told(caplog, outage_logger) == [
        f"the central database ({name}) is unavailable: no response within 0.05 s",
        f"the central database ({name}) is available again",
    ]
    assert [line for line in told(caplog, health.logger) if CENTRAL in line] == []


async def test_a_central_database_that_does_not_answer_makes_it_not_ready(
    sqlite_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(_: object, history: str) -> None:
        if history == "central":
            await asyncio.Event().wait()

    monkeypatch.setattr(health, "require_newest_schema", hang)
    monkeypatch.setattr(health, "CHECK_SECONDS_MAX", 0.05)
    async with plane_on(sqlite_databases, tmp_path) as plane, client_of(plane) as client:
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()["checks"]["central"]) == (503, "timeout")
        assert (await client.get("/healthz")).status_code == 200


async def test_a_check_that_resists_its_cancellation_delays_no_answer(
    sqlite_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = asyncio.Event()

    async def hang(_: object, history: str) -> None:
        if history == "central":
            try:
                await asyncio.Event().wait()
            finally:
                await released.wait()

    monkeypatch.setattr(health, "require_newest_schema", hang)
    monkeypatch.setattr(health, "CHECK_SECONDS_MAX", 0.05)
    async with plane_on(sqlite_databases, tmp_path) as plane, client_of(plane) as client:
        async with asyncio.timeout(60):
            answer = await client.get("/readyz")
        released.set()
    assert (answer.status_code, answer.json()["checks"]["central"]) == (503, "timeout")


async def test_health_needs_no_answer_of_a_database_that_hangs(
    sqlite_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def hang(_: Database) -> AsyncIterator[Tx]:
        await asyncio.Event().wait()
        yield  # type: ignore[misc]

    async with plane_on(sqlite_databases, tmp_path) as plane, client_of(plane) as client:
        with monkeypatch.context() as patch:
            for name in ("read", "transaction", "execute_one"):
                patch.setattr(Database, name, hang)
            patch.setattr(health, "CHECK_SECONDS_MAX", 0.05)
            async with asyncio.timeout(60):
                assert (await client.get("/healthz")).status_code == 200
                assert (await client.get("/readyz")).status_code == 503


async def test_a_pool_that_fails_is_logged_as_degraded(
    sqlite_databases: Databases,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def check(_: object, history: str) -> None:
        if history == "tenant":
            raise Unavailable("cannot switch to state 12")

    async with plane_on(sqlite_databases, tmp_path) as plane, client_of(plane) as client:
        monkeypatch.setattr(health, "require_newest_schema", check)
        assert (await client.get("/readyz")).json()["status"] == "degraded"
    assert told(caplog, health.logger) == ["degraded: pool main: unavailable"]


async def test_a_state_that_lasts_is_logged_at_its_start_and_end(
    sqlite_databases: Databases,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_away = True

    async def check(_: object, history: str) -> None:
        if is_away and history == "central":
            raise Unavailable("cannot switch to state 12")

    monkeypatch.setattr(health, "require_newest_schema", check)
    async with plane_on(sqlite_databases, tmp_path) as plane, client_of(plane) as client:
        for _ in range(3):
            assert (await client.get("/readyz")).status_code == 503
        is_away = False
        for _ in range(3):
            assert (await client.get("/readyz")).status_code == 200
    lines = [each.message for each in caplog.records if each.name == health.logger.name]
    assert lines == ["not ready: central: unavailable", "ready again: central"]
