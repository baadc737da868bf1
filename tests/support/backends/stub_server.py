"""A ComfyUI server with scripted responses, to test misbehavior that the engine doesn't have."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket, WebSocketDisconnect

from comfyfleet.comfy import BackendLimits, CallTally, ComfyServer, ServerSettings
from comfyfleet.transport.retry import RetryPolicy

GraphSetup = Callable[["StubServer", str], Awaitable[None]]
LIMITS = BackendLimits(
    job_seconds=5,
    poll_seconds=0.05,
    answer_seconds=1,
    connect_seconds=1,
    stall_seconds=1,
    cancel_seconds=1,
)


class StubServer:
    """The queue, history and websockets of a ComfyUI, without execution.

    `on_prompt` is called for each accepted prompt. `answers` replace those of single routes (`POST
    /prompt`), one after another.
    """

    def __init__(self, on_prompt: GraphSetup | None = None) -> None:
        self.on_prompt = on_prompt
        self.running: list[Any] = []
        self.pending: list[Any] = []
        self.history: dict[str, Any] = {}
        self.sockets: list[tuple[str, WebSocket]] = []
        self.requests: list[tuple[str, Any]] = []
        self.answers: dict[str, list[Response]] = {}
        self.deaf_to_interrupts = 0
        self.url = ""
        self._plays: set[asyncio.Task[None]] = set()

    async def end(self) -> None:
        for on_prompt in self._plays:
            on_prompt.cancel()
        await asyncio.gather(*self._plays, return_exceptions=True)

    async def send(self, kind: str, **data: Any) -> None:
        await self.send_raw(json.dumps({"type": kind, "data": data}))

    async def send_raw(self, raw: str | bytes) -> None:
        _, socket = self.sockets[-1]
        await (socket.send_text(raw) if isinstance(raw, str) else socket.send_bytes(raw))

    async def drop_socket(self) -> None:
        _, socket = self.sockets[-1]
        await socket.close(1011)

    def finish(self, run_id: str, *messages: Any, status: str = "success", **outputs: Any) -> None:
        self.running = [row for row in self.running if row[1] != run_id]
        self.pending = [row for row in self.pending if row[1] != run_id]
        self.history[run_id] = {
            "prompt": [],
            "outputs": outputs,
            "status": {
                "status_str": status,
                "completed": status == "success",
                "messages": messages,
            },
            "meta": {},
        }

    def bodies(self, operation: str) -> list[Any]:
        return [body for name, body in self.requests if name == operation]

    async def answer(self, request: Request) -> Response:
        raw = await request.body()
        is_json = request.headers.get("content-type") == "application/json"
        operation = f"{request.method} {request.url.path}"
        body = json.loads(raw) if is_json else None
        self.requests.append((operation, body))
        usual = self._usual(operation, body)
        if replaced := self.answers.get(operation):
            return replaced.pop(0)
        return usual

    def _usual(self, operation: str, body: Any) -> Response:
        match operation.split("/"):
            case ["POST ", "prompt"]:
                return self._take(body)
            case ["GET ", "queue"]:
                return JSONResponse({"queue_running": self.running, "queue_pending": self.pending})
            case ["GET ", "history", run_id]:
                item = self.history.get(run_id)
                return JSONResponse({run_id: item} if item else {})
            case ["POST ", "queue"]:
                self.pending = [row for row in self.pending if row[1] not in body["delete"]]
            case ["POST ", "interrupt"]:
                self._interrupt(body["prompt_id"])
            case ["POST ", "api", *_]:
                return Response(status_code=405)
        return Response()

    def _take(self, body: Any) -> Response:
        run_id = body["prompt_id"]
        self.running.append([0, run_id, body["prompt"], {"client_id": body["client_id"]}, []])
        if self.on_prompt is not None:
            self._plays.add(asyncio.ensure_future(self.on_prompt(self, run_id)))
        return JSONResponse({"prompt_id": run_id, "number": 0, "node_errors": {}})

    def _interrupt(self, run_id: str) -> None:
        if self.deaf_to_interrupts:
            self.deaf_to_interrupts -= 1
            return
        message = ["execution_interrupted", {"prompt_id": run_id, "node_id": "1"}]
        self.finish(run_id, message, status="error")

    async def talk(self, socket: WebSocket) -> None:
        await socket.accept()
        self.sockets.append((socket.query_params["clientId"], socket))
        await socket.send_json(
            {"type": "status", "data": {"status": {"exec_info": {"queue_remaining": 0}}}}
        )
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            while True:
                await socket.receive_text()

    def app(self) -> ASGIApp:
        methods = ["GET", "POST"]
        route = Route("/{path:path}", self.answer, methods=methods)
        return Starlette(routes=[WebSocketRoute("/ws", self.talk), route])


async def until(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it has not come true")


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving_stub(stub_server: StubServer) -> AsyncIterator[StubServer]:
    config = uvicorn.Config(
        stub_server.app(),
        port=0,
        log_config=None,
        ws="websockets-sansio",
        ws_ping_interval=None,
        timeout_graceful_shutdown=1,
    )
    server = _QuietServer(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    stub_server.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield stub_server
    finally:
        await stub_server.end()
        server.should_exit = server.force_exit = True
        await serving


@contextlib.asynccontextmanager
async def client_of(
    stub_server: StubServer, limits: BackendLimits = LIMITS
) -> AsyncIterator[tuple[ComfyServer, CallTally]]:
    """A client with short pauses, and its call counts."""
    tally = CallTally()
    retry = RetryPolicy(sleep=lambda seconds: asyncio.sleep(seconds * 0.05))
    async with (
        serving_stub(stub_server),
        ComfyServer(ServerSettings(stub_server.url, limits), meter=tally, retry=retry) as it,
    ):
        yield it, tally
