"""Calls of the API: the key goes to the control plane only, and trouble that passes is waited out.

A call that may have been heard is said again only if hearing it twice does the same as once.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from comfyfleet.client.answers import error_of
from comfyfleet.client.patience import RETRY_AFTER_SECONDS_MAX, Patience, retry_after_seconds
from comfyfleet.kernel.errors import OutcomeUnknown, ServerUnavailable

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 60.0
TRANSFER_SECONDS = 300.0
# Shorter than what servers commonly keep idle connections for: they would be closed under us.
KEEP_ALIVE_SECONDS = 4.0
# Refused before anything was done: our control plane's 429 is that, a 503 may come from behind.
UNHEARD = frozenset({429})
PASSING = frozenset({429, 502, 503, 504})
# Nothing was sent yet.
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    path: str  # below the base URL
    body: Mapping[str, Any] | None = None
    query: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    is_repeatable: bool = False  # as far as the caller knows; GET, PUT and DELETE always are
    answer_seconds: float = ANSWER_SECONDS

    @property
    def may_repeat(self) -> bool:
        return self.is_repeatable or self.method in ("GET", "PUT", "DELETE")


class Calls:
    def __init__(
        self,
        base_url: str,
        key: str,
        *,
        patience: Patience,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.patience = patience
        self._base = base_url.rstrip("/")
        self._key = key
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_SECONDS),
            transport=transport,
        )

    async def ask(self, call: Call) -> httpx.Response:
        """An answer of success. Raises our errors, ServerUnavailable and OutcomeUnknown."""
        attempt = 0
        while True:
            attempt += 1
            is_last = attempt >= self.patience.attempts_max
            try:
                response = await self._send(call)
            except httpx.TransportError as error:
                if is_last or not (call.may_repeat or isinstance(error, UNSENT)):
                    raise _no_answer(call, error) from error
                await self.patience.back_off(attempt)
                continue
            if response.is_success or response.status_code == httpx.codes.NOT_MODIFIED:
                return response
            if is_last or not await self._waited(call, response, attempt):
                raise error_of(response)

    async def _send(self, call: Call) -> httpx.Response:
        return await self.client.request(
            call.method,
            f"{self._base}{call.path}",
            json=None if call.body is None else dict(call.body),
            params={name: value for name, value in call.query.items() if value is not None},
            headers={**self._bearer, **call.headers},
            timeout=httpx.Timeout(call.answer_seconds, connect=CONNECT_SECONDS),
        )

    async def _waited(self, call: Call, response: httpx.Response, attempt: int) -> bool:
        """Whether it is worth asking again, now that the time has passed."""
        if response.status_code not in (PASSING if call.may_repeat else UNHEARD):
            return False
        seconds = retry_after_seconds(response.headers)
        if seconds is None:
            await self.patience.back_off(attempt)
            return True
        if seconds > RETRY_AFTER_SECONDS_MAX:
            return False
        await self.patience.sleep(seconds)
        return True

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[httpx.Response]:
        """Asked once; whoever reads it decides about another time."""
        async with self.client.stream(
            call.method,
            f"{self._base}{call.path}",
            headers={**self._bearer, **call.headers},
            timeout=httpx.Timeout(call.answer_seconds, connect=CONNECT_SECONDS),
        ) as response:
            yield response

    @property
    def _bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"}


def _no_answer(call: Call, error: httpx.TransportError) -> ServerUnavailable | OutcomeUnknown:
    reason = str(error) or type(error).__name__
    if call.may_repeat or isinstance(error, UNSENT):
        return ServerUnavailable(f"{call.method} {call.path}: no answer: {reason}")
    return OutcomeUnknown(
        f"{call.method} {call.path} was sent, and nobody can tell whether it was heard: {reason}"
    )
