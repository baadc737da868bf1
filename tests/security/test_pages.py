"""What anybody may read, and what it gives away."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import URL, plane_on

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http.app import create_app


def stranger_at(plane: ControlPlane) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(plane)), base_url=URL)


async def test_made_up_methods_make_no_series(sqlite_databases: Databases, tmp_path: Path) -> None:
    async with plane_on(sqlite_databases, tmp_path) as plane, stranger_at(plane) as stranger:
        for number in range(20):
            await stranger.request(f"ZZ{number}", "/nowhere")
        figures = (await stranger.get("/metrics")).text
    assert "ZZ" not in figures
    assert 'method="OTHER"' in figures


async def test_metrics_need_their_key_where_one_is_set(
    sqlite_databases: Databases, tmp_path: Path
) -> None:
    async with (
        plane_on(sqlite_databases, tmp_path, metrics_key="figures-only") as plane,
        stranger_at(plane) as stranger,
    ):
        for header in ({}, {"Authorization": "Bearer x"}):
            assert (await stranger.get("/metrics", headers=header)).status_code == 401
        header = {"Authorization": "Bearer figures-only"}
        assert (await stranger.get("/metrics", headers=header)).status_code == 200


async def test_pages_load_nothing_from_elsewhere_and_run_no_script(
    sqlite_databases: Databases, tmp_path: Path
) -> None:
    async with (
        plane_on(sqlite_databases, tmp_path, web=False) as plane,
        stranger_at(plane) as stranger,
    ):
        home = await stranger.get("/", headers={"Accept": "text/html"})
        docs = await stranger.get("/docs")
        told = (await stranger.get("/")).json()
        slash = await stranger.get("/docs/", headers={"Host": "evil.example"})
    assert told["documentation"] == "/docs"
    assert 'href="/docs"' in home.text
    assert "POST /api/ai-jobs" in docs.text
    for page in (home, docs):
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "<script" not in page.text
    assert slash.status_code == 404


async def test_the_document_is_made_once_and_beside_the_loop(
    sqlite_databases: Databases, tmp_path: Path
) -> None:
    async with plane_on(sqlite_databases, tmp_path) as plane:
        app, threads = create_app(plane), []
        make = app.openapi

        def made() -> dict[str, Any]:
            threads.append(threading.current_thread())
            return make()

        app.openapi = made  # type: ignore[method-assign]
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=URL) as stranger:
            answers = await asyncio.gather(
                *(stranger.get(path) for path in ("/openapi.json", "/docs", "/openapi.json"))
            )
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert answers[0].json() == make()
        (thread,) = threads
        assert thread is not threading.current_thread()
