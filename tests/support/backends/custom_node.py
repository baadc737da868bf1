"""A ComfyUI with a custom node's routes, and the requests that they received."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from comfyfleet.engine import Served, serve_in_thread
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.serve import create_app

PREFIX = "/api/etn"
FILES = f"{PREFIX}/files/"
INSTALLED = "AddNoise"  # a node type of ComfyUI that the engine lacks
HOLD_SECONDS_MAX = 60.0
LARGE_BYTES = 11 * 1000**2
Asked = tuple[str, str, dict[str, str], bytes]


@dataclass
class CustomNode:
    """A custom node's routes. `/hold` doesn't respond until `released` is set."""

    name: str = ""
    beneath: ASGIApp | None = None
    asked: list[Asked] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    engine: Engine | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    refuses_files: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.beneath is not None and not scope.get("path", "").startswith(PREFIX):
            await self.beneath(scope, receive, send)
            return
        request = Request(scope, receive)
        query = f"?{request.url.query}" if request.url.query else ""
        path = f"{request.url.path}{query}"
        self.asked.append((request.method, path, dict(request.headers), await request.body()))
        if request.url.path.startswith(FILES):
            await (await self._file(request))(scope, receive, send)
            return
        await (await self._answer(request.url.path))(scope, receive, send)

    async def _file(self, request: Request) -> Response:
        """Stores, returns or removes a file of this backend."""
        path = request.url.path
        if request.method == "PUT":
            if self.refuses_files:
                return Response(b"no", 507)
            self.files[path] = await request.body()
            return Response(self.name.encode(), 201)
        if path not in self.files:
            return Response(b"none", 404)
        data = self.files.pop(path) if request.method == "DELETE" else self.files[path]
        return Response(data, media_type="application/octet-stream")

    def methods(self) -> list[str]:
        return [method for method, _, _, _ in self.asked]

    async def _answer(self, path: str) -> Response:
        if path.endswith("/away"):
            return RedirectResponse("http://169.254.169.254/")
        if path.endswith("/large"):
            return Response(b"x" * LARGE_BYTES, media_type="application/octet-stream")
        if path.endswith("/hold"):
            await asyncio.to_thread(self.released.wait, HOLD_SECONDS_MAX)
        if path.endswith("/install") and self.engine is not None:
            known = self.engine.nodes
            self.engine.nodes = {**known, INSTALLED: known["ImageInvert"]}
        if path.endswith("/json"):
            return Response(b'{"a": 1}', media_type="application/json")
        return Response(
            b"<script>1</script>",
            media_type="text/html",
            headers={"Set-Cookie": "a=b", "Access-Control-Allow-Origin": "*", "X-Inner": "1"},
        )

    @contextmanager
    def served(self) -> Iterator[Served]:
        """With an engine beneath."""

        def app_of(engine: Engine) -> ASGIApp:
            self.engine, self.beneath = engine, create_app(engine)
            return self

        with serve_in_thread(app_of=app_of) as served:
            try:
                yield served
            finally:
                self.released.set()  # the server ends when it has answered
