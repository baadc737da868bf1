"""A real Comfy API v2 server: comfy-api-proxy, configured like its command, in this event loop."""

import contextlib
from collections.abc import AsyncIterator, Callable

from aiohttp import web
from comfy_api_proxy.app import make_app
from comfy_api_proxy.auth import make_bearer_auth_middleware
from comfy_api_proxy.middleware import make_origin_only_middleware


@contextlib.asynccontextmanager
async def comfy_api_proxy(
    comfyui_url: str, key: str
) -> AsyncIterator[tuple[str, Callable[[], int]]]:
    """Yields its URL, and a function that closes all its connections and returns their number."""
    middlewares = [make_origin_only_middleware([]), make_bearer_auth_middleware(key)]
    runner = web.AppRunner(make_app(comfyui_url, middlewares=middlewares), shutdown_timeout=1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}", lambda: cut_connections(runner)
    finally:
        await runner.cleanup()


def cut_connections(runner: web.AppRunner) -> int:
    assert runner.server is not None
    transports = [connection.transport for connection in runner.server.connections]
    for transport in transports:
        if transport is not None:
            transport.abort()
    return len(transports)
