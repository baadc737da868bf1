"""ComfyUI's websocket: a client hears of its own prompts."""

import asyncio
import contextlib
import json
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from comfyfleet.protocol.sockets import json_frame
from comfyfleet.server.gateway.feed import GatewaySocket
from comfyfleet.server.gateway.history import active_jobs
from comfyfleet.server.gateway.model import CLIENT_ID_CHARACTERS_MAX
from comfyfleet.server.http.gateway.app import GatewayCall
from comfyfleet.server.http.gateway.info import features_of


async def serve_socket(call: GatewayCall, websocket: WebSocket) -> None:
    await websocket.accept()
    given = websocket.query_params.get("clientId") or uuid.uuid4().hex
    client_id = given[:CLIENT_ID_CHARACTERS_MAX]
    feeds = call.gateway.feeds
    socket = await feeds.join(call.caller, client_id)
    remaining = len(await active_jobs(call.plane, call.caller))
    status = {"exec_info": {"queue_remaining": remaining}}
    socket.push(json_frame("status", {"status": status, "sid": client_id}))
    feeds.of(call.caller).add(socket)
    try:
        await pump(websocket, socket, features_of(call.plane))
    finally:
        await feeds.leave(call.caller, socket)


async def pump(websocket: WebSocket, socket: GatewaySocket, features: Mapping[str, Any]) -> None:
    """Writes and listens until the client goes, or has stopped reading for too long."""
    running = [
        asyncio.ensure_future(part)
        for part in (
            _write(websocket, socket),
            _listen(websocket, socket, features),
            socket.overrun.wait(),
        )
    ]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for part in running:
            part.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await websocket.close()


async def _write(websocket: WebSocket, socket: GatewaySocket) -> None:
    while True:
        frame = await socket.next_frame()
        if isinstance(frame, str):
            await websocket.send_text(frame)
        else:
            await websocket.send_bytes(frame)


async def _listen(websocket: WebSocket, socket: GatewaySocket, features: Mapping[str, Any]) -> None:
    """Only the first text that is JSON counts, and only if it is `feature_flags`."""
    is_first = True
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            return
        try:
            said = json.loads(message.get("text") or "")
        except ValueError:
            continue
        if is_first and isinstance(said, dict) and said.get("type") == "feature_flags":
            supported = said.get("data")
            socket.features = supported if isinstance(supported, dict) else {}
            socket.push(json_frame("feature_flags", features))
        is_first = False


SOCKETS = {"/ws": serve_socket, "/api/ws": serve_socket}
