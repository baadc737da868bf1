"""A ComfyUI server as a backend: HTTP and websocket.

The contract suite was run against ComfyUI 0.7.0 and 0.27.0 on CPU; recorded talks with 0.7.0 and
0.28.0 are read in tests.
"""

import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from comfyfleet.comfy.backend import (
    Cancellation,
    Description,
    Device,
    Fetched,
    OutputFile,
    Outputs,
    Prompt,
    Submitted,
    Uploaded,
)
from comfyfleet.comfy.calls import Call, Calls
from comfyfleet.comfy.cancelling import cancel_run
from comfyfleet.comfy.events import Cancelled, Event
from comfyfleet.comfy.following import Follower
from comfyfleet.comfy.lines import Line, Lines
from comfyfleet.comfy.messages import RunOver
from comfyfleet.comfy.meter import Meter, Tally
from comfyfleet.comfy.outputs import find_outputs
from comfyfleet.comfy.places import Absent, Running, Waiting, ended, handed_in, locate
from comfyfleet.comfy.settings import ServerSettings
from comfyfleet.comfy.shapes import list_in, mapping_at, mapping_in, number_at
from comfyfleet.comfy.submitting import send_prompt
from comfyfleet.comfy.surroundings import Surroundings
from comfyfleet.comfy.transfers import fetch_file, upload_file
from comfyfleet.kernel.errors import FleetError, InvalidValue, PromptRefused, RunLost

UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
FREE = {"unload_models": True, "free_memory": True}


class ComfyServer:
    """See Backend. Each run may be followed once at a time."""

    def __init__(
        self,
        settings: ServerSettings | None = None,
        *,
        meter: Meter | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        settings = settings or ServerSettings()
        limits = settings.limits
        timeout = httpx.Timeout(limits.answer_seconds, connect=limits.connect_seconds)
        self._calls = Calls(
            httpx.AsyncClient(base_url=settings.base_url, timeout=timeout),
            limits=limits,
            meter=meter or Tally(),
            surroundings=surroundings or Surroundings(),
        )
        self._lines = Lines(self._calls)

    async def __aenter__(self) -> "ComfyServer":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._lines.aclose()
        await self._calls.client.aclose()

    async def describe(self) -> Description:
        nodes, stats = Call("GET", "/object_info"), Call("GET", "/system_stats")
        answers = await self._calls.ask_json(nodes), await self._calls.ask_json(stats)
        with self._calls.reading(nodes.operation):
            object_info = mapping_in(answers[0], "the node types")
        with self._calls.reading(stats.operation):
            return describe_server(object_info, mapping_in(answers[1], "the system stats"))

    async def devices(self) -> tuple[Device, ...]:
        """As `describe` tells them, without the node types, which are megabytes."""
        call = Call("GET", "/system_stats")
        answer = await self._calls.ask_json(call)
        with self._calls.reading(call.operation):
            return describe_server({}, mapping_in(answer, "the system stats")).devices

    async def queue_length(self) -> int:
        call = Call("GET", "/prompt", is_look=True)
        answer = await self._calls.ask_json(call)
        with self._calls.reading(call.operation, logging.INFO):
            what = "the queue's length"
            info = mapping_at(mapping_in(answer, what), "exec_info", what)
            return int(number_at(info, "queue_remaining", what))

    async def upload(self, path: Path, *, name: str | None = None, subfolder: str = "") -> Uploaded:
        return await upload_file(self._calls, path, name, subfolder)

    async def submit(
        self, prompt: Prompt, *, prompt_id: str, extra_data: Mapping[str, Any] | None = None
    ) -> Submitted:
        if not UUID.fullmatch(prompt_id):
            raise InvalidValue(f"{prompt_id!r} is no lower-case UUID", prompt_id=prompt_id)
        channel = await self._lines.open()
        await self._lines.add(prompt_id, channel)
        try:
            run_id = await send_prompt(
                self._calls,
                prompt,
                prompt_id=prompt_id,
                client_id=channel.client_id if channel else self._calls.surroundings.new_id(),
                extra_data=extra_data,
            )
        except BaseException as error:
            await self._lines.drop(prompt_id)
            await self._stop_the_rest(error)
            raise
        if run_id != prompt_id:
            # Old servers choose the id themselves.
            await self._lines.drop(prompt_id)
            await self._lines.add(run_id, channel)
        return Submitted(run_id)

    async def _stop_the_rest(self, error: BaseException) -> None:
        """What is left of a prompt that was refused in part runs all the same."""
        run_id = error.details.get("run_id") if isinstance(error, PromptRefused) else None
        if run_id is None:
            return
        try:
            await cancel_run(self._calls, run_id)
        except FleetError as trouble:
            error.add_note(f"The rest of it may be running as {run_id}: {trouble.message}")

    async def adopt(self, prompt_id: str) -> Submitted | None:
        line = self._lines.get(prompt_id) or await self._find(prompt_id)
        return None if line is None else Submitted(prompt_id, adopted=True)

    async def handed_in(self, run_id: str) -> tuple[Mapping[str, Any], Sequence[str]] | None:
        """The prompt of a run, and which of its nodes are outputs; None where the server doesn't tell."""
        return await handed_in(self._calls, run_id)

    async def _find(self, run_id: str) -> Line | None:
        match await locate(self._calls, run_id):
            case Absent():
                return None
            case Waiting(client_id=client_id) | Running(client_id=client_id):
                return await self._lines.adopt(run_id, client_id)
        return await self._lines.adopt(run_id, None)

    async def follow(self, run_id: str) -> AsyncIterator[Event]:
        line = self._lines.get(run_id) or await self._find(run_id)
        if line is None:
            raise RunLost(f"the server knows no run {run_id}", run_id=run_id)
        fresh, line.fresh = line.fresh, False
        follower = Follower(self._calls, run_id, line.inbox, line.channel)
        try:
            async for event in follower.events(look_first=not fresh):
                yield event
        except RunLost:
            await self._lines.drop(run_id)
            raise
        await self._lines.drop(run_id)

    async def outputs(self, run_id: str) -> Outputs:
        record = await ended(self._calls, run_id)
        if record is None:
            raise RunLost(f"run {run_id} is not in the server's history", run_id=run_id)
        return find_outputs(record.outputs, record.cached)

    async def fetch(self, file: OutputFile, to: Path) -> Fetched:
        return await fetch_file(self._calls, file, to)

    async def cancel(self, run_id: str) -> Cancellation:
        result = await cancel_run(self._calls, run_id)
        line = self._lines.get(run_id)
        if result is Cancellation.CANCELLED and line is not None:
            # The server says nothing to its followers when it deletes a run that waits.
            line.inbox.put(Cancelled(run_id))
            line.inbox.put(RunOver(run_id))
        return result

    async def free(self) -> None:
        await self._calls.ask(Call("POST", "/free", json=FREE))


def describe_server(object_info: Mapping[str, Any], stats: Mapping[str, Any]) -> Description:
    """The same answers everywhere, other than their figures."""
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
    )
