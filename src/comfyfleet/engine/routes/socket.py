"""The websocket: what a client is told, from the moment it connects."""

import asyncio
import contextlib
import json
import uuid

from starlette.websockets import WebSocket, WebSocketDisconnect

from comfyfleet.engine import frames
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.features import FEATURES
from comfyfleet.engine.sockets import Socket


async def talk(engine: Engine, websocket: WebSocket) -> None:
    await websocket.accept()
    client_id = websocket.query_params.get("clientId") or uuid.uuid4().hex
    socket = engine.sockets.connect(client_id)
    greet(engine, socket, client_id)
    try:
        await converse(websocket, socket)
    finally:
        engine.sockets.disconnect(client_id)


def greet(engine: Engine, socket: Socket, client_id: str) -> None:
    socket.push(frames.message("status", {"status": engine.status(), "sid": client_id}))
    executing = engine.executor.executing
    if executing is not None and executing[0] == client_id:
        socket.push(frames.message("executing", {"node": executing[1]}))


async def converse(websocket: WebSocket, socket: Socket) -> None:
    """Write and listen until the client goes, or has stopped reading for too long."""
    running = [
        asyncio.ensure_future(part)
        for part in (_write(websocket, socket), _listen(websocket, socket), socket.overrun.wait())
    ]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for part in running:
            part.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await websocket.close()


async def _write(websocket: WebSocket, socket: Socket) -> None:
    while True:
        frame = await socket.next_frame()
        if isinstance(frame, str):
            await websocket.send_text(frame)
        else:
            await websocket.send_bytes(frame)


async def _listen(websocket: WebSocket, socket: Socket) -> None:
    """Only the first text that is JSON counts, and only if it is `feature_flags`."""
    first = True
    while (message := await websocket.receive())["type"] != "websocket.disconnect":
        text = message.get("text")
        if not first or text is None:
            continue
        try:
            said = json.loads(text)
        except ValueError:
            continue
        first = not isinstance(said, dict)
        if isinstance(said, dict) and said.get("type") == "feature_flags":
            flags = said.get("data", {})
            socket.features = flags if isinstance(flags, dict) else {}
            socket.push(frames.message("feature_flags", FEATURES))
