"""Comfy Cloud as a backend. Uses API v2 if the server supports it, and v1 otherwise."""

import asyncio
import contextlib
import ssl
import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx

from comfyfleet.comfy.answers import mapping_in, shorten, unexpected_answer
from comfyfleet.comfy.backend import (
    BackendAbilities,
    Cancellation,
    CloudSettings,
    Description,
    Fetched,
    MessageTap,
    OutputFile,
    Outputs,
    Prompt,
    Submitted,
    Uploaded,
)
from comfyfleet.comfy.calls import BackendCalls, CallMeter, CallTally, parse_answer
from comfyfleet.comfy.cloud_calls import (
    call_repeatable,
    is_loopback,
    parse_error_body,
    storage_transport,
)
from comfyfleet.comfy.cloud_v1 import CloudSocket, CloudV1
from comfyfleet.comfy.cloud_v2 import CloudV2
from comfyfleet.comfy.events import Event
from comfyfleet.errors import AccessDenied, InvalidValue, NotOffered, UnexpectedAnswer
from comfyfleet.transport.http import Call, open_client
from comfyfleet.transport.retry import RetryPolicy

Api = Literal["v1", "v2"]

UNKNOWN_JOB_ID = "00000000-0000-0000-0000-000000000000"
NO_SUCH_ROUTE = frozenset({404, 405, 501})


async def detect_api(v1: BackendCalls, v2: BackendCalls) -> Api:
    """Detects the API version of the server.

    Raises AccessDenied, ServerUnavailable or UnexpectedAnswer if the version can't be determined.
    """
    call = Call("GET", "/jobs/{id}", path=f"/jobs/{UNKNOWN_JOB_ID}")
    try:
        response = await call_repeatable(v2, call)
    except AccessDenied:
        # The routes may be behind a gate that only accepts v1 keys.
        return await _detect_v1(v1)
    # Both versions return 404. v2 has the route but not the job, and responds with its error
    # envelope. v1 doesn't have the route.
    if parse_error_body(response.content).has_envelope:
        return "v2"
    if response.status_code in NO_SUCH_ROUTE:
        return await _detect_v1(v1)
    with v2.count_unexpected(call.operation):
        raise unexpected_answer(f"{call.operation} returned {response.status_code}", response.text)


async def _detect_v1(v1: BackendCalls) -> Api:
    call = Call("GET", "/prompt")
    response = await call_repeatable(v1, call)
    with v1.count_unexpected(call.operation):
        if response.status_code != 200:
            raise unexpected_answer("this server isn't Comfy Cloud", shorten(response.text))
        what = "the length of the queue"
        mapping_in(mapping_in(parse_answer(call, response), what).get("exec_info"), what)
    return "v1"


V1_ABILITIES = BackendAbilities(frees=False)
V2_ABILITIES = BackendAbilities(
    describes=False,
    frees=False,
    reports_nodes=False,
    returns_texts=False,
    reports_folders=False,
    refuses_partial_prompts=False,
    reports_error_types=False,
)


class ComfyCloud:
    """The backend for Comfy Cloud. The methods are described in Backend.

    The API version is detected with the first call that succeeds. The key is sent only to the
    origin of `base_url`.
    """

    def __init__(
        self,
        settings: CloudSettings,
        *,
        meter: CallMeter | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        _require_encryption(settings)
        retry = retry or RetryPolicy()
        # Created once, because reading all certificates takes longer than a request.
        trust = httpx.create_ssl_context()
        self._storage = storage_transport(httpx.URL(settings.base_url), trust)
        calls = partial(_calls, settings, trust, meter or CallTally(), retry)
        self._v1_calls = calls("api", {"X-API-Key": settings.key})
        bearer = {"Authorization": f"Bearer {settings.key}"} if settings.key else {}
        self._v2_calls = calls("api/v2", bearer)
        socket = CloudSocket(self._v1_calls, settings.key, str(uuid.uuid4()))
        self._v1 = CloudV1(self._v1_calls, self._storage, socket)
        self._v2 = CloudV2(self._v2_calls, self._storage)
        self._known: Api | None = None
        self._probing = asyncio.Lock()

    async def __aenter__(self) -> "ComfyCloud":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._v1.aclose()
        await self._v2.aclose()
        await self._storage.aclose()

    async def api(self) -> Api:
        """Returns the API version of this server."""
        async with self._probing:
            if self._known is None:
                self._known = await detect_api(self._v1_calls, self._v2_calls)
            return self._known

    async def abilities(self) -> BackendAbilities:
        if await self.api() == "v1":
            return V1_ABILITIES
        return replace(V2_ABILITIES, describes=await self._describes())

    async def describe(self) -> Description:
        """Returns the node types through v1's route, which some servers with v2 have as well.
        Raises NotOffered if the server doesn't have that route."""
        try:
            return await self._v1.describe()
        except UnexpectedAnswer as error:
            if error.details.get("status") in NO_SUCH_ROUTE:
                raise NotOffered("this server doesn't list its node types") from error
            raise

    async def queue_length(self) -> int:
        return await (await self._detected()).queue_length()

    async def upload(self, path: Path, *, name: str | None = None, subfolder: str = "") -> Uploaded:
        return await (await self._detected()).upload(path, name=name)

    async def submit(
        self, prompt: Prompt, *, prompt_id: str, extra_data: Mapping[str, Any] | None = None
    ) -> Submitted:
        _check_id(prompt_id)
        chosen = await self._detected()
        return await chosen.submit(prompt, prompt_id=prompt_id, extra_data=extra_data)

    async def adopt(self, prompt_id: str) -> Submitted | None:
        return await (await self._detected()).adopt(prompt_id)

    async def follow(self, run_id: str, *, tap: MessageTap | None = None) -> AsyncGenerator[Event]:
        """Yields the events of a run. Only one caller at a time can follow a run."""
        async with contextlib.aclosing((await self._detected()).follow(run_id, tap=tap)) as events:
            async for event in events:
                yield event

    async def outputs(self, run_id: str) -> Outputs:
        return await (await self._detected()).outputs(run_id)

    async def fetch(self, file: OutputFile, to: Path, *, bytes_max: int | None = None) -> Fetched:
        return await (await self._detected()).fetch(file, to, bytes_max=bytes_max)

    async def cancel(self, run_id: str) -> Cancellation:
        return await (await self._detected()).cancel(run_id)

    async def free(self) -> None:
        """Does nothing, because the cloud manages the memory of its own machines."""

    async def _describes(self) -> bool:
        try:
            await self.describe()
        except NotOffered:
            return False
        return True

    async def _detected(self) -> CloudV1 | CloudV2:
        return self._v1 if await self.api() == "v1" else self._v2


def _require_encryption(settings: CloudSettings) -> None:
    """Raises InvalidValue if the key would be sent to another machine over plain http, where anyone
    on the network could read it."""
    base = httpx.URL(settings.base_url)
    if settings.key and base.scheme != "https" and not is_loopback(base):
        raise InvalidValue(
            f"the key must not be sent to {settings.base_url} without encryption. Use https.",
            base_url=settings.base_url,
        )


def _calls(
    settings: CloudSettings,
    trust: ssl.SSLContext,
    meter: CallMeter,
    retry: RetryPolicy,
    path: str,
    headers: Mapping[str, str],
) -> BackendCalls:
    limits = settings.limits
    client = open_client(
        f"{settings.base_url.rstrip('/')}/{path}",
        headers=headers,
        answer_seconds=limits.answer_seconds,
        connect_seconds=limits.connect_seconds,
        verify=trust,
    )
    return BackendCalls(client, limits=limits, meter=meter, retry=retry)


def _check_id(prompt_id: str) -> None:
    try:
        is_known_form = str(uuid.UUID(prompt_id)) == prompt_id
    except ValueError:
        is_known_form = False
    if not is_known_form:
        raise InvalidValue(f"{prompt_id!r} is not a lowercase UUID", prompt_id=prompt_id)
