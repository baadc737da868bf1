"""Passes calls to custom nodes' routes on to the backend if the worker's own settings allow
them."""

import asyncio
import logging
from collections.abc import Callable
from urllib.parse import unquote

import httpx

from comfyfleet.api.route_calls import (
    METHODS,
    READING,
    REASON_CHARACTERS_MAX,
    REQUEST_HEADERS,
    RESPONSE_HEADERS,
    ROUTE_BYTES_MAX,
    RouteAnswer,
    RouteCall,
    RoutePoll,
    is_below,
    is_plain,
    passed_headers,
)
from comfyfleet.errors import FleetError, Refused, Unavailable, WorkerRevoked
from comfyfleet.transport.http import describe_network_error, open_client
from comfyfleet.transport.retry import RetryPolicy
from comfyfleet.worker.control_client import ControlClient
from comfyfleet.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)
CONCURRENT_CALLS_MAX = 4
# Seconds until the next poll while the backend is down (PAUSE_SECONDS), or if the control plane
# doesn't support route calls (UNKNOWN_SECONDS).
PAUSE_SECONDS = 1.0
UNKNOWN_SECONDS = 60.0
ATTEMPTS_MAX = 6  # limits how long the pause between failed polls gets


class RouteRefused(Exception):
    """Raised if a call isn't sent to the backend, or if the backend's response isn't returned."""


class RoutePasser:
    """Polls for route calls, and handles each one while the next poll waits.

    `on_change` is called after a call that may have changed the backend's models or node types.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        control: ControlClient,
        *,
        worker_id: Callable[[], str],
        is_ready: Callable[[], bool],
        on_change: Callable[[], None],
        retry: RetryPolicy,
    ) -> None:
        self._prefixes = settings.passthrough
        self._control = control
        self._worker_id = worker_id
        self._is_ready = is_ready
        self._on_change = on_change
        self._retry = retry
        self._failures = 0
        self._room = asyncio.Semaphore(CONCURRENT_CALLS_MAX)
        self._client = open_client(settings.backend_url or "")

    async def run(self) -> None:
        """Runs until it is cancelled or the worker is revoked."""
        try:
            async with asyncio.TaskGroup() as calls:
                while True:
                    await self._room.acquire()
                    call = await self._next()
                    if call is None:
                        self._room.release()
                    else:
                        calls.create_task(self._handle(call))
        except* WorkerRevoked:
            logger.info("route calls are no longer passed on, because this worker was revoked")
        finally:
            await self._client.aclose()

    async def _next(self) -> RouteCall | None:
        if not self._is_ready():
            await self._retry.sleep(PAUSE_SECONDS)
            return None
        message = RoutePoll(
            worker_id=self._worker_id(),
            prefixes=self._prefixes,
            wait_seconds=self._control.wait_seconds,
        )
        try:
            polled = await self._control.poll_routes(message)
        except WorkerRevoked:
            raise
        except FleetError as error:
            await self._pause(error)
            return None
        self._failures = 0
        return polled.call

    async def _pause(self, error: FleetError) -> None:
        self._failures = min(self._failures + 1, ATTEMPTS_MAX)
        if isinstance(error, Refused):
            logger.warning("polling for route calls failed", extra={"reason": error.message})
            await self._retry.sleep(UNKNOWN_SECONDS)
        else:
            await self._retry.back_off(self._failures)

    async def _handle(self, call: RouteCall) -> None:
        try:
            answer = await self.pass_on(call)
            if call.method not in READING and answer.status and answer.status < 400:
                self._on_change()
            await self._control.answer_route(answer)
        except Unavailable as error:
            # The answer isn't sent again, because its caller may no longer be waiting.
            logger.warning(
                "the answer to a route call was not delivered", extra={"reason": error.message}
            )
        except FleetError as error:
            logger.info("the answer to a route call was rejected", extra={"reason": error.message})
        finally:
            self._room.release()

    async def pass_on(self, call: RouteCall) -> RouteAnswer:
        """Sends a call to the backend once and returns the answer or the error."""
        try:
            self._check(call)
            async with asyncio.timeout(call.answer_seconds):
                return await self._ask(call)
        except (RouteRefused, httpx.HTTPError, TimeoutError) as error:
            reason = (
                str(error) if isinstance(error, RouteRefused) else describe_network_error(error)
            )
            logger.warning("a route call failed", extra={"reason": reason})
            return self._answer(call, error=reason[:REASON_CHARACTERS_MAX])

    def _check(self, call: RouteCall) -> None:
        """Raises RouteRefused if a call isn't allowed. The control plane has checked the call too,
        but the owner of this machine shouldn't have to trust it."""
        path = unquote(call.target.partition("?")[0])
        is_ours = any(is_below(prefix, path) for prefix in self._prefixes)
        if call.method not in METHODS or not is_ours or not is_plain(path):
            raise RouteRefused("this worker's settings don't allow calls to that route")

    async def _ask(self, call: RouteCall) -> RouteAnswer:
        headers = passed_headers(call.headers, REQUEST_HEADERS)
        request = self._client.build_request(
            call.method, call.target, headers=headers, content=call.body
        )
        response = await self._client.send(request, stream=True, follow_redirects=False)
        try:
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > ROUTE_BYTES_MAX:
                    raise RouteRefused(f"the response is larger than {ROUTE_BYTES_MAX:,} bytes")
        finally:
            await response.aclose()
        headers = passed_headers(response.headers, RESPONSE_HEADERS)
        return self._answer(call, status=response.status_code, headers=headers, body=bytes(body))

    def _answer(self, call: RouteCall, **fields: object) -> RouteAnswer:
        return RouteAnswer.model_validate(
            {"worker_id": self._worker_id(), "call_id": call.id, **fields}
        )
