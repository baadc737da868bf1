"""Comfy Cloud, API v1. As documented in August 2026."""

import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import httpx

from comfyfleet.comfy.backend import (
    Cancellation,
    Description,
    Fetched,
    OutputFile,
    Outputs,
    Prompt,
    Submitted,
    Uploaded,
)
from comfyfleet.comfy.calls import Call, Calls, json_of
from comfyfleet.comfy.cloud.complaints import complaint_in
from comfyfleet.comfy.cloud.downloads import download
from comfyfleet.comfy.cloud.following import follow
from comfyfleet.comfy.cloud.marker import MARKER_KEY, marker_of, with_marker
from comfyfleet.comfy.cloud.patience import ask, send
from comfyfleet.comfy.cloud.socket import CloudSocket
from comfyfleet.comfy.cloud.v1_cancel import cancel_run
from comfyfleet.comfy.cloud.v1_places import ended, look
from comfyfleet.comfy.cloud.v1_search import Search, search
from comfyfleet.comfy.events import Event
from comfyfleet.comfy.outputs import find_outputs
from comfyfleet.comfy.refusals import refusal
from comfyfleet.comfy.server import describe_server
from comfyfleet.comfy.shapes import mapping_in, number_at, parse_json, text_at
from comfyfleet.comfy.transfers import upload_file
from comfyfleet.kernel.errors import (
    CreditsExhausted,
    FleetError,
    OutcomeUnknown,
    PromptRefused,
    RunLost,
    ServerUnavailable,
    UnexpectedAnswer,
)

RUNS_HEARD_MAX = 1000


class CloudV1:
    """See Backend. `calls` have the key; `storage` must not."""

    def __init__(
        self, calls: Calls, storage: httpx.AsyncBaseTransport, socket: CloudSocket
    ) -> None:
        self._calls = calls
        self._storage = storage
        self._socket = socket
        # Runs that are heard from their beginning and have not been followed.
        self._heard: deque[str] = deque(maxlen=RUNS_HEARD_MAX)

    async def aclose(self) -> None:
        await self._socket.aclose()
        await self._calls.client.aclose()

    async def describe(self) -> Description:
        object_info = await self._json(Call("GET", "/object_info"), "the node types")
        return describe_server(object_info, await self._json(Call("GET", "/system_stats"), "stats"))

    async def queue_length(self) -> int:
        call = Call("GET", "/prompt")
        answer = await self._json(call, "the length of the queue")
        with self._calls.reading(call.operation):
            info = mapping_in(answer.get("exec_info"), "'exec_info'")
            return int(number_at(info, "queue_remaining", "'exec_info'"))

    async def upload(self, path: Path, *, name: str | None = None) -> Uploaded:
        return await upload_file(self._calls, path, name)

    async def submit(
        self, prompt: Prompt, *, prompt_id: str, extra_data: Mapping[str, Any] | None = None
    ) -> Submitted:
        await self._socket.start()
        sent = {
            "prompt": with_marker(prompt, prompt_id),
            "extra_data": {**(extra_data or {}), MARKER_KEY: marker_of(prompt_id)},
        }
        call = Call("POST", "/prompt", json=sent)
        try:
            response = await send(self._calls, call)
            with self._calls.reading(call.operation):
                run_id, partly = read_submit(call, response, prompt)
        except (OutcomeUnknown, UnexpectedAnswer) as error:
            return await self._find_again(prompt_id, error)
        if partly is not None:
            await self._take_back(run_id, partly)
        if self._socket.is_open:
            self._heard.append(run_id)
        return Submitted(run_id)

    async def adopt(self, prompt_id: str) -> Submitted | None:
        found = await search(self._calls, prompt_id)
        if found.run_id is not None:
            return Submitted(found.run_id, adopted=True)
        if not found.is_complete:
            raise OutcomeUnknown(
                "the run is not among the newest jobs of the account, and older ones can't be "
                "searched",
                prompt_id=prompt_id,
            )
        return None

    async def follow(self, run_id: str) -> AsyncGenerator[Event]:
        await self._socket.start()
        events = follow(
            run_id,
            self._socket.join(run_id),
            lambda: look(self._calls, run_id),
            self._calls,
            is_heard=self._is_heard(run_id),
        )
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event
        finally:
            self._socket.leave(run_id)

    async def outputs(self, run_id: str) -> Outputs:
        record = await ended(self._calls, run_id)
        if record is None:
            raise RunLost(f"the cloud has no ended run {run_id}", run_id=run_id)
        return find_outputs(record.outputs, record.cached)

    async def fetch(self, file: OutputFile, to: Path) -> Fetched:
        params = {"filename": file.filename, "subfolder": file.subfolder, "type": file.folder}
        call = Call("GET", "/view", params=params)
        return await download(self._calls, self._storage, call, to)

    async def cancel(self, run_id: str) -> Cancellation:
        return await cancel_run(self._calls, run_id)

    async def free(self) -> None:
        """The cloud's machines are its own business."""

    async def _take_back(self, run_id: str, partly: PromptRefused) -> NoReturn:
        """Half a result is none: what would run of it is stopped, as far as that is possible."""
        try:
            await self.cancel(run_id)
        except FleetError as error:
            raise partly from error
        raise partly

    def _is_heard(self, run_id: str) -> bool:
        if run_id not in self._heard:
            return False
        self._heard.remove(run_id)
        return self._socket.is_open

    async def _json(self, call: Call, what: str) -> Mapping[str, Any]:
        response = await ask(self._calls, call)
        with self._calls.reading(call.operation):
            return mapping_in(json_of(call, response), what)

    async def _find_again(
        self, prompt_id: str, error: OutcomeUnknown | UnexpectedAnswer
    ) -> Submitted:
        """Never sent again: what is not found now may still be on its way into the queue."""
        if 400 <= int(error.details.get("status") or 0) < 500:
            raise error
        found = Search(None)
        for attempt in range(1, self._calls.limits.max_retries + 2):
            with contextlib.suppress(ServerUnavailable, UnexpectedAnswer):
                found = await search(self._calls, prompt_id, found.others)
            if found.run_id is not None:
                return Submitted(found.run_id, adopted=True)
            await self._calls.surroundings.back_off(attempt)
        raise OutcomeUnknown(
            f"the prompt was sent and not confirmed ({error.message}), and no job of the account "
            "carries its sign; it may still appear: adopt it later by its id",
            prompt_id=prompt_id,
        ) from error


def read_submit(
    call: Call, response: httpx.Response, prompt: Prompt
) -> tuple[str, PromptRefused | None]:
    """The run, and why part of it would not run."""
    if response.status_code == 400:
        raise _refused(response, prompt)
    if response.status_code == 402:
        told = complaint_in(response.content).message
        raise CreditsExhausted(f"the cloud wants to be paid first: {told}")
    answer = mapping_in(json_of(call, response), "the answer to a prompt")
    run_id = text_at(answer, "prompt_id", "the answer to a prompt")
    partly = refusal(answer, prompt) if answer.get("node_errors") else None
    return run_id, partly


def _refused(response: httpx.Response, prompt: Prompt) -> PromptRefused:
    body = mapping_in(parse_json(response.content, "a refusal"), "a refusal")
    if "error" in body or "node_errors" in body:
        return refusal(body, prompt)
    return PromptRefused(str(body.get("message") or "The prompt was refused"), problems=())
