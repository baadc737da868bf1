"""Serves an ASGI application on a free port with a real uvicorn in this process."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import uvicorn
from starlette.types import ASGIApp


def free_listener() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"http://{host}:{port}"


@contextlib.asynccontextmanager
async def served(app: ASGIApp, listener: socket.socket) -> AsyncIterator[uvicorn.Server]:
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    )
    # Not run(): it would take over the signals of the test. Who comes early waits in the backlog.
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield server
    finally:
        server.should_exit = True
        await serving
        listener.close()
