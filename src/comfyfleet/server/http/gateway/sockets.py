"""ComfyUI's WebSocket, which sends events about the user's own prompts."""

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from comfyfleet.errors import Unavailable
from comfyfleet.protocol.sockets import json_frame
from comfyfleet.server.db.errors import log_level_of
from comfyfleet.server.gateway.client_socket import GatewaySocket
from comfyfleet.server.gateway.model import CLIENT_ID_CHARACTERS_MAX
from comfyfleet.server.http import streams
from comfyfleet.server.http.gateway.app import GatewayCall
from comfyfleet.server.http.gateway.info import features_of
from comfyfleet.server.http.streams import StreamKeyCheck

logger = logging.getLogger(__name__)
NORMAL, SERVICE_RESTART, TRY_AGAIN_LATER = 1000, 1012, 1013


async def serve_socket(call: GatewayCall, websocket: WebSocket) -> None:
    await websocket.accept()
    client_id_sent = websocket.query_params.get("clientId") or uuid.uuid4().hex
    client_id = client_id_sent[:CLIENT_ID_CHARACTERS_MAX]
    feeds = call.gateway.feeds
    try:
        socket = await feeds.join(call.caller, client_id)
    except Unavailable as error:
        logger.log(log_level_of(error), "can't open a client's socket: %s", error.message)
        await websocket.close(TRY_AGAIN_LATER)
        return
    meters = call.plane.meters
    meters.gateway_sockets.inc()
    try:
        key = StreamKeyCheck(call.plane, call.caller)
        stopping = call.plane.stopping
        await pump(
            websocket, socket, features_of(call.plane), key, meters.gateway_events.inc, stopping
        )
    finally:
        meters.gateway_sockets.dec()
        await feeds.leave(call.caller, socket)
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        await websocket.close(SERVICE_RESTART if stopping.is_set() else NORMAL)


async def pump(
    websocket: WebSocket,
    socket: GatewaySocket,
    features: Mapping[str, Any],
    key: StreamKeyCheck,
    count_sent: Callable[[], None],
    stopping: asyncio.Event,
) -> None:
    """Sends and receives messages until the client disconnects or stops reading for too long, its
    key becomes invalid, or this process stops."""
    parts: tuple[Coroutine[Any, Any, object], ...] = (
        _write(websocket, socket, count_sent),
        _listen(websocket, socket, features),
        socket.overrun.wait(),
        _watch(key),
        stopping.wait(),
    )
    running = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for part in running:
            part.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _write(
    websocket: WebSocket, socket: GatewaySocket, count_sent: Callable[[], None]
) -> None:
    while True:
        frame = await socket.next_frame()
        if isinstance(frame, str):
            await websocket.send_text(frame)
        else:
            await websocket.send_bytes(frame)
        socket.note_taken()
        count_sent()


async def _watch(key: StreamKeyCheck) -> None:
    """Returns when the key that opened the socket has expired or was revoked."""
    while True:
        await asyncio.sleep(streams.KEY_SECONDS)
        try:
            if not await key.is_valid():
                return
        except Unavailable as error:
            logger.log(log_level_of(error), "can't check a socket's key: %s", error.message)


async def _listen(websocket: WebSocket, socket: GatewaySocket, features: Mapping[str, Any]) -> None:
    """Receives messages until the client disconnects.

    Only the first text message is parsed, and only `feature_flags` has an effect.
    """
    is_first = True
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            return
        text = message.get("text")
        if is_first and text is not None:
            is_first = False
            _take_features(socket, text, features)
        # Lets other tasks run, because receiving buffered frames doesn't suspend this one.
        await asyncio.sleep(0)


def _take_features(socket: GatewaySocket, text: str, features: Mapping[str, Any]) -> None:
    try:
        sent = json.loads(text)
    except (ValueError, RecursionError):
        return
    if isinstance(sent, dict) and sent.get("type") == "feature_flags":
        supported = sent.get("data")
        socket.features = supported if isinstance(supported, dict) else {}
        socket.push(json_frame("feature_flags", features))


SOCKETS = {"/ws": serve_socket, "/api/ws": serve_socket}
