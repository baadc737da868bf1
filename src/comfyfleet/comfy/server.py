"""A ComfyUI server as a backend, via HTTP and websocket. A prompt is submitted exactly once. A
cancel is repeated until it is confirmed. Outputs are read from the server's history.

The contract suite was run against ComfyUI 0.7.0 and 0.27.0 on CPU. Recorded conversations with
0.7.0 and 0.28.0 are replayed in tests.
"""

import logging
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from comfyfleet.comfy.answers import (
    list_in,
    mapping_at,
    mapping_in,
    number_at,
    parse_json,
    refusal_from,
    text_at,
)
from comfyfleet.comfy.backend import (
    Cancellation,
    Description,
    Device,
    Fetched,
    MessageTap,
    OutputFile,
    Outputs,
    OutputValue,
    Prompt,
    ServerSettings,
    Submitted,
    Uploaded,
)
from comfyfleet.comfy.calls import (
    BackendCalls,
    CallMeter,
    CallTally,
    fetch_file,
    parse_answer,
    require_success,
    upload_file,
)
from comfyfleet.comfy.events import Cancelled, Event
from comfyfleet.comfy.follow import Follower
from comfyfleet.comfy.messages import RunOver
from comfyfleet.comfy.run_location import (
    Absent,
    Executing,
    InHistory,
    InQueue,
    RunLocation,
    find_in_history,
    locate_run,
    submitted_prompt,
)
from comfyfleet.comfy.sockets import RunSocket, SocketPool
from comfyfleet.errors import (
    CancelUnconfirmed,
    FleetError,
    InvalidValue,
    OutcomeUnknown,
    PromptRefused,
    RunLost,
    ServerUnavailable,
    UnexpectedAnswer,
)
from comfyfleet.transport.http import Call, open_client
from comfyfleet.transport.retry import RetryPolicy

FOLDERS = ("output", "input", "temp")
# Output keys that aren't results. They only describe the files next to them for the editor.
ABOUT_FILES = frozenset({"animated"})


def find_outputs(outputs: object, reused: Sequence[str] = ()) -> Outputs:
    """Collects files and values under all keys. A value that names a file is a file, and everything
    else is a value."""
    items = tuple(_parse_outputs(mapping_in(outputs, "the outputs of a run"), frozenset(reused)))
    return Outputs(
        tuple(item for item in items if isinstance(item, OutputFile)),
        tuple(item for item in items if isinstance(item, OutputValue)),
        tuple(reused),
    )


def _parse_outputs(
    outputs: Mapping[str, Any], reused: frozenset[str]
) -> Iterator[OutputFile | OutputValue]:
    for node_id, values_by_key in outputs.items():
        for key, values in mapping_in(values_by_key, f"the output of node {node_id}").items():
            for value in values if isinstance(values, list) else [values]:
                yield from _parse_output(node_id, key, value, node_id in reused)


def _parse_output(
    node_id: str, key: str, value: object, reused: bool
) -> Iterator[OutputFile | OutputValue]:
    if isinstance(value, dict) and isinstance(name := value.get("filename"), str) and name:
        folder = value.get("type")
        yield OutputFile(
            node_id,
            key,
            name,
            str(value.get("subfolder") or ""),
            folder if folder in FOLDERS else "output",
            reused,
        )
    elif value is not None and key not in ABOUT_FILES:
        yield OutputValue(node_id, key, value, reused)


ROUTE = "/prompt"


async def send_prompt(
    calls: BackendCalls,
    prompt: Prompt,
    *,
    prompt_id: str,
    client_id: str,
    extra_data: Mapping[str, Any] | None,
) -> str:
    """Sends a prompt and returns the run's id.

    Raises PromptRefused, even if a part of the prompt would run. In this case, its details contain
    the `run_id` of that part.
    """
    body = {"prompt": prompt, "prompt_id": prompt_id, "client_id": client_id}
    if extra_data:
        body["extra_data"] = extra_data
    # The prompt is sent without a number, because two waiting prompts with the same number and id
    # would kill the server's prompt thread.
    call = Call("POST", ROUTE, json=body)
    try:
        # The call is retried only if it was not sent, because ComfyUI would run a repeated prompt
        # twice.
        response = require_success(call, await calls.send(call, may_repeat=False))
        return _read(calls, call, response, prompt)
    except (OutcomeUnknown, UnexpectedAnswer) as error:
        return await _find_submitted(calls, call, prompt_id, error)


def _read(calls: BackendCalls, call: Call, response: httpx.Response, prompt: Prompt) -> str:
    with calls.count_unexpected(call.operation):
        if response.status_code == 400:
            body = mapping_in(parse_json(response.content, "a refusal"), "a refusal")
            if "error" in body:
                raise refusal_from(body, prompt)
        answer = mapping_in(parse_answer(call, response), "the answer to a prompt")
        run_id = text_at(answer, "prompt_id", "the answer to a prompt")
    if answer.get("node_errors"):
        partly = refusal_from(answer, prompt)
        raise PromptRefused(partly.message, **partly.details, run_id=run_id)
    return run_id


async def _find_submitted(calls: BackendCalls, call: Call, prompt_id: str, error: Exception) -> str:
    """Looks for the prompt after a response that was missing or unreadable. Raises an error if it
    is not found."""
    for attempt in range(1, calls.limits.max_retries + 2):
        try:
            if not isinstance(await locate_run(calls, prompt_id), Absent):
                return prompt_id
        except (ServerUnavailable, UnexpectedAnswer) as failure:
            error = failure
        await calls.retry.back_off(attempt)
    raise _outcome_of_search(calls, call, prompt_id, error) from error


def _outcome_of_search(
    calls: BackendCalls, call: Call, prompt_id: str, error: Exception
) -> FleetError:
    if isinstance(error, UnexpectedAnswer) and (error.details.get("status") or 0) >= 400:
        return error
    reason = error.message if isinstance(error, FleetError) else str(error) or type(error).__name__
    return OutcomeUnknown(
        f"the prompt was sent but not confirmed ({reason}). It was not found in the queue or "
        "history. It may still arrive. Adopt it by its id, or submit it with a new id.",
        prompt_id=prompt_id,
    )


PAUSE_FIRST_SECONDS = 0.02
PAUSE_SECONDS_MAX = 1.0
ATTEMPTS_MAX = 1000


async def cancel_run(calls: BackendCalls, run_id: str) -> Cancellation:
    """Cancels a run. Repeats the stop request until a poll confirms the end, because an interrupt
    between two nodes of a run can get lost."""
    clock, before = calls.retry.clock, None
    deadline = clock() + calls.limits.cancel_seconds
    for attempt in range(ATTEMPTS_MAX):
        location = await locate_run(calls, run_id)
        if (confirmed := _confirmed(location, before)) is not None:
            return confirmed
        if clock() >= deadline:
            break
        await _ask_to_stop(calls, run_id, location, attempt)
        before = location
        await calls.retry.sleep(min(PAUSE_FIRST_SECONDS * 2.0**attempt, PAUSE_SECONDS_MAX))
    raise CancelUnconfirmed(
        f"run {run_id} was still running {calls.limits.cancel_seconds:g} s after a stop request",
        run_id=run_id,
    )


def _confirmed(location: RunLocation, before: RunLocation | None) -> Cancellation | None:
    match location:
        case InHistory(end=Cancelled()):
            return Cancellation.CANCELLED
        case InHistory():
            return Cancellation.ENDED_BEFORE
        case Absent():
            # The history doesn't contain runs that were deleted from the queue.
            deleted = isinstance(before, InQueue)
            return Cancellation.CANCELLED if deleted else Cancellation.NOT_FOUND
    return None


async def _ask_to_stop(
    calls: BackendCalls, run_id: str, location: RunLocation, attempt: int
) -> None:
    if attempt == 0:
        # On newer servers, a single call cancels a waiting or executing run, which avoids a race
        # condition.
        route = "/api/jobs/{id}/cancel"
        answer = await calls.ask(Call("POST", route, path=f"/api/jobs/{run_id}/cancel"))
        if answer.status_code == 200:
            return
    if isinstance(location, InQueue):
        await calls.ask(Call("POST", "/queue", json={"delete": [run_id]}))
    else:
        # Always send the id. Without it, the server stops the executing run of any client.
        await calls.ask(Call("POST", "/interrupt", json={"prompt_id": run_id}))


UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
FREE = {"unload_models": True, "free_memory": True}


class ComfyServer:
    """A ComfyUI server. The methods are described in Backend. Only one caller at a time can follow
    a run."""

    def __init__(
        self,
        settings: ServerSettings | None = None,
        *,
        meter: CallMeter | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        settings = settings or ServerSettings()
        limits = settings.limits
        self._calls = BackendCalls(
            open_client(
                settings.base_url,
                answer_seconds=limits.answer_seconds,
                connect_seconds=limits.connect_seconds,
            ),
            limits=limits,
            meter=meter or CallTally(),
            retry=retry or RetryPolicy(),
        )
        self._sockets = SocketPool(self._calls)

    async def __aenter__(self) -> "ComfyServer":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._sockets.aclose()
        await self._calls.client.aclose()

    async def describe(self) -> Description:
        nodes, stats = Call("GET", "/object_info"), Call("GET", "/system_stats")
        answers = await self._calls.ask_json(nodes), await self._calls.ask_json(stats)
        with self._calls.count_unexpected(nodes.operation):
            object_info = mapping_in(answers[0], "the node types")
        with self._calls.count_unexpected(stats.operation):
            return describe_server(object_info, mapping_in(answers[1], "the system stats"))

    async def devices(self) -> tuple[Device, ...]:
        """Returns the devices without fetching the node types, which are megabytes."""
        call = Call("GET", "/system_stats")
        answer = await self._calls.ask_json(call)
        with self._calls.count_unexpected(call.operation):
            return describe_server({}, mapping_in(answer, "the system stats")).devices

    async def queue_length(self) -> int:
        call = Call("GET", "/prompt", is_poll=True)
        answer = await self._calls.ask_json(call)
        with self._calls.count_unexpected(call.operation, logging.INFO):
            what = "the queue's length"
            info = mapping_at(mapping_in(answer, what), "exec_info", what)
            return int(number_at(info, "queue_remaining", what))

    async def upload(self, path: Path, *, name: str | None = None, subfolder: str = "") -> Uploaded:
        return await upload_file(self._calls, path, name, subfolder)

    async def submit(
        self, prompt: Prompt, *, prompt_id: str, extra_data: Mapping[str, Any] | None = None
    ) -> Submitted:
        if not UUID.fullmatch(prompt_id):
            raise InvalidValue(f"{prompt_id!r} is not a lowercase UUID", prompt_id=prompt_id)
        channel = await self._sockets.open()
        await self._sockets.add(prompt_id, channel)
        try:
            run_id = await send_prompt(
                self._calls,
                prompt,
                prompt_id=prompt_id,
                client_id=channel.client_id if channel else str(uuid.uuid4()),
                extra_data=extra_data,
            )
        except BaseException as error:
            await self._sockets.drop(prompt_id)
            await self._cancel_accepted_part(error)
            raise
        if run_id != prompt_id:
            # Old servers ignore our id and choose another.
            await self._sockets.drop(prompt_id)
            await self._sockets.add(run_id, channel)
        return Submitted(run_id)

    async def _cancel_accepted_part(self, error: BaseException) -> None:
        """Cancels the part of a refused prompt that would still run."""
        run_id = error.details.get("run_id") if isinstance(error, PromptRefused) else None
        if run_id is None:
            return
        try:
            await cancel_run(self._calls, run_id)
        except FleetError as failure:
            error.add_note(f"The accepted part may be running as {run_id}: {failure.message}")

    async def adopt(self, prompt_id: str) -> Submitted | None:
        run_socket = self._sockets.get(prompt_id) or await self._find(prompt_id)
        return None if run_socket is None else Submitted(prompt_id, adopted=True)

    async def submitted_prompt(self, run_id: str) -> tuple[Mapping[str, Any], Sequence[str]] | None:
        """Returns the prompt of a run and the ids of its output nodes, or None if the server
        doesn't return them."""
        return await submitted_prompt(self._calls, run_id)

    async def _find(self, run_id: str) -> RunSocket | None:
        match await locate_run(self._calls, run_id):
            case Absent():
                return None
            case InQueue(client_id=client_id) | Executing(client_id=client_id):
                return await self._sockets.adopt(run_id, client_id)
        return await self._sockets.adopt(run_id, None)

    async def follow(self, run_id: str, *, tap: MessageTap | None = None) -> AsyncIterator[Event]:
        run_socket = self._sockets.get(run_id) or await self._find(run_id)
        if run_socket is None:
            raise RunLost(f"run {run_id} doesn't exist on the server", run_id=run_id)
        fresh, run_socket.fresh = run_socket.fresh, False
        run_socket.inbox.tap = tap
        follower = Follower(self._calls, run_id, run_socket.inbox, run_socket.channel)
        try:
            async for event in follower.events(poll_first=not fresh):
                yield event
        except RunLost:
            await self._sockets.drop(run_id)
            raise
        await self._sockets.drop(run_id)

    async def outputs(self, run_id: str) -> Outputs:
        record = await find_in_history(self._calls, run_id)
        if record is None:
            raise RunLost(f"run {run_id} is not in the server's history", run_id=run_id)
        outputs = find_outputs(record.outputs, record.cached)
        return replace(outputs, history=record.entry)

    async def fetch(self, file: OutputFile, to: Path, *, bytes_max: int | None = None) -> Fetched:
        return await fetch_file(self._calls, file, to, bytes_max)

    async def cancel(self, run_id: str) -> Cancellation:
        result = await cancel_run(self._calls, run_id)
        run_socket = self._sockets.get(run_id)
        if result is Cancellation.CANCELLED and run_socket is not None:
            # The server sends no message when it deletes a waiting run.
            run_socket.inbox.put(Cancelled(run_id))
            run_socket.inbox.put(RunOver(run_id))
        return result

    async def free(self) -> None:
        await self._calls.ask(Call("POST", "/free", json=FREE))


def describe_server(object_info: Mapping[str, Any], stats: Mapping[str, Any]) -> Description:
    """Builds a Description from the responses of `/object_info` and `/system_stats`."""
    system = mapping_at(stats, "system", "the system stats")
    devices = list_in(stats.get("devices") or [], "'devices' of the system stats")
    return Description(
        object_info,
        str(system.get("comfyui_version") or ""),
        tuple(_device(mapping_in(device, "a device")) for device in devices),
        stats,
    )


def _device(data: Mapping[str, Any]) -> Device:
    return Device(
        str(data.get("name") or ""),
        str(data.get("type") or ""),
        int(data.get("vram_total") or 0),
        int(data.get("vram_free") or 0),
        int(data.get("torch_vram_total") or 0),
    )
