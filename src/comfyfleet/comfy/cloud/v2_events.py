"""The live events of API v2: no ids, no resume, so what was missed is asked for."""

import base64
import binascii
from collections.abc import Iterator
from dataclasses import replace

import httpx

from comfyfleet.comfy.calls import NETWORK_ERRORS, Call, Calls
from comfyfleet.comfy.cloud.job import ENDED, parse_output, parse_progress, parse_status
from comfyfleet.comfy.cloud.patience import RETRY_AFTER_SECONDS_MAX, retry_after_seconds
from comfyfleet.comfy.cloud.routes import about
from comfyfleet.comfy.events import (
    NodeDone,
    NodeStarted,
    Preview,
    Progress,
    Reconnected,
    Started,
)
from comfyfleet.comfy.inbox import Inbox
from comfyfleet.comfy.messages import Message, RunOver
from comfyfleet.comfy.shapes import mapping_in, parse_json, text_at, unexpected
from comfyfleet.kernel.errors import LimitExceeded, UnexpectedAnswer
from comfyfleet.kernel.server_events import EventParser, ServerEvent

ROUTE = "/jobs/{id}/events"


class Listener:
    """Puts what the stream of one run tells into an inbox, until the run is over.

    Never raises: where no stream can be had, the run is polled.
    """

    def __init__(self, calls: Calls, run_id: str, inbox: Inbox) -> None:
        self._calls = calls
        self._run_id = run_id
        self._inbox = inbox
        self._node_id: str | None = None
        self._done: set[str] = set()
        self._is_over = False
        self._was_cut = False

    async def listen(self, link: str | None) -> None:
        """A stream that is cut is opened again, unless it told nothing too often."""
        own = about("GET", ROUTE, self._run_id)
        call = own if link is None else replace(own, path=link)
        failures = 0
        while not self._is_over and failures <= self._calls.limits.max_retries:
            if failures:
                await self._calls.surroundings.back_off(failures)
            has_told = await self._hear_out(call)
            failures = 1 if has_told else failures + 1

    async def _hear_out(self, call: Call) -> bool:
        """Whether anything was told before the stream ended."""
        has_told = False
        try:
            async with self._calls.stream(call) as response:
                if not await self._is_stream(response):
                    return False
                if self._was_cut:
                    self._inbox.put(Reconnected(self._run_id))
                self._was_cut = False
                parser = EventParser()
                async for piece in response.aiter_bytes():
                    for event in parser.feed(piece):
                        has_told = True
                        self._take(event)
        except (*NETWORK_ERRORS, LimitExceeded):
            self._was_cut = True
            return has_told
        # comfy-api-proxy closes the stream of a run that ends even when it can't tell the end yet.
        self._inbox.put(RunOver(self._run_id))
        return has_told

    async def _is_stream(self, response: httpx.Response) -> bool:
        """Too many streams: later there may be a place. Anything else: there is none for us."""
        if response.status_code == 200:
            return True
        seconds = retry_after_seconds(response.headers)
        if response.status_code == 429 and seconds is not None:
            await self._calls.surroundings.sleep(min(seconds, RETRY_AFTER_SECONDS_MAX))
        else:
            self._is_over = response.status_code < 500 or response.status_code == 501
        return False

    def _take(self, event: ServerEvent) -> None:
        try:
            with self._calls.reading(f"events: {event.name}"):
                messages = tuple(self._messages(event))
        except UnexpectedAnswer:
            # Counted and logged; what it may have told is found by polling.
            return
        for message in messages:
            self._inbox.put(message)

    def _messages(self, event: ServerEvent) -> Iterator[Message]:
        data = parse_json(event.data, "an event")
        match event.name:
            case "status":
                yield from self._status(data)
            case "progress":
                yield from self._progress(data)
            case "preview":
                yield _preview(self._run_id, data)
            case "output":
                yield from self._output(data)

    def _status(self, data: object) -> Iterator[Message]:
        status = parse_status(mapping_in(data, "a status"))
        if status in ENDED:
            self._is_over = True
            yield RunOver(self._run_id)
        elif status == "running":
            yield Started(self._run_id)

    def _progress(self, data: object) -> Iterator[Message]:
        progress = parse_progress(data)
        node_id = progress.node_id
        if node_id is None:
            return
        if node_id != self._node_id:
            self._node_id = node_id
            yield NodeStarted(self._run_id, node_id, node_id)
        if progress.step is not None and progress.steps:
            yield Progress(self._run_id, node_id, progress.step, progress.steps)

    def _output(self, data: object) -> Iterator[Message]:
        node_id = parse_output(data).node_id
        if node_id not in self._done:
            self._done.add(node_id)
            yield NodeDone(self._run_id, node_id)


def _preview(run_id: str, data: object) -> Preview:
    what = "a preview"
    preview = mapping_in(data, what)
    text = text_at(preview, "data_base64", what)
    try:
        picture = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise unexpected("a preview should be base64", text) from error
    node_id = preview.get("node_id")
    content_type = text_at(preview, "content_type", what)
    return Preview(run_id, str(node_id) if node_id else None, content_type, picture)
