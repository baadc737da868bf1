"""Browsers that sign in, with a cookie jar and the CSRF token that pages send."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.types import Message
from tests.support.server.control_plane import URL, at_once

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.middleware import WrongKeyThrottle
from comfyfleet.server.http.sessions import COOKIE, CSRF_HEADER

SECONDS_MAX = 30.0


@dataclass
class BrowserClient:
    """A browser that shows one of our pages. `headers` are the headers of the page's requests."""

    client: httpx.AsyncClient
    app: Any
    csrf: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        told = {CSRF_HEADER: self.csrf} if self.csrf else {}
        return {"Origin": URL, "Sec-Fetch-Site": "same-origin", **told}

    @property
    def secret(self) -> str | None:
        return self.client.cookies.get(COOKIE)

    async def sign_in(self, key: str) -> dict[str, Any]:
        answer = await self.client.post("/api/session", json={"key": key}, headers=self.headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        self.csrf = found["csrf"]
        return found

    async def sign_out(self) -> httpx.Response:
        answer = await self.client.delete("/api/session", headers=self.headers)
        assert answer.status_code == 204, answer.text
        return answer

    async def who(self) -> dict[str, Any]:
        answer = await self.client.get("/api/session", headers=self.headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def call(self, method: str, path: str, **given: Any) -> httpx.Response:
        """As a page of ours does."""
        return await self.client.request(method, path, headers=self.headers, **given)

    async def status(self, method: str, path: str, headers: dict[str, str]) -> int:
        """The status alone, with the cookie: what follows it may have no end."""
        kept = f"{COOKIE}={self.secret}"
        return await status_of(self.app, method, path, {"Cookie": kept, **headers})


@asynccontextmanager
async def browser_at(plane: ControlPlane, **given: Any) -> AsyncIterator[BrowserClient]:
    app = create_app(plane, **given)
    app.state.wrong_keys = WrongKeyThrottle(at_once)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
        yield BrowserClient(client, app)


async def status_of(app: Any, method: str, path: str, headers: dict[str, str]) -> int:
    """The status of an answer, whose body is not waited for."""
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await asyncio.Event().wait()
        is_read = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start" and not started.done():
            started.set_result(message["status"])

    given = {"host": URL.removeprefix("http://"), **headers}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "scheme": "http",
        "method": method.upper(),
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        "client": ("192.0.2.1", 4711),
        "server": ("control.test", 80),
    }
    answering = asyncio.create_task(app(scope, receive, send))
    try:
        async with asyncio.timeout(SECONDS_MAX):
            await asyncio.wait({answering, started}, return_when=asyncio.FIRST_COMPLETED)
            return await started
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
