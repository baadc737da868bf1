"""A graph run in hand: follow it, answer its questions, wait for it, take what it made."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any
from uuid import UUID

from pydantic import ValidationError

from comfyfleet.client.answers import parsed
from comfyfleet.client.calls import Call, Calls
from comfyfleet.client.graph_model import Choice, GraphEvent, GraphRun
from comfyfleet.client.jobs import free_path
from comfyfleet.client.listening import Listening
from comfyfleet.client.uploading import Transferred, fetch
from comfyfleet.kernel.errors import RunFailed, RunTimedOut
from comfyfleet.kernel.server_events import ServerEvent

POLL_SECONDS = 0.5
POLL_SECONDS_MAX = 5.0


class GraphRunHandle:
    """`run` is as it was last heard of; `idempotency_key` is what it was started with, if it was here."""

    def __init__(self, calls: Calls, run: GraphRun, *, idempotency_key: str | None = None) -> None:
        self._calls = calls
        self.run = run
        self.idempotency_key = idempotency_key

    @property
    def id(self) -> UUID:
        return self.run.id

    @property
    def _path(self) -> str:
        return f"/api/graph-runs/{self.id}"

    def __repr__(self) -> str:
        return f"GraphRunHandle({self.id}, {self.run.status})"

    async def refresh(self, *, executions: int | None = None) -> GraphRun:
        """At most so many executions; without a number as many as the API gives by itself."""
        call = Call("GET", self._path, query={"executions": executions})
        return self._heard(parsed(GraphRun, await self._calls.ask(call)))

    def _heard(self, run: GraphRun) -> GraphRun:
        self.run = run
        return run

    async def events(self) -> AsyncGenerator[GraphEvent, None]:
        """How it stands, whenever that changes, until it is over; polled where no stream comes through."""
        listening = Listening(self._calls, f"{self._path}/events", _event)
        async with aclosing(listening.all_heard()) as heard:
            async for event in heard:
                listening.is_over |= event.ends_run
                if not event.ends_run or event.kind == "end":
                    yield event  # the last progress is told again as the end
        if not listening.is_over:
            async with aclosing(self._polled()) as polled:
                async for event in polled:
                    yield event

    async def _polled(self) -> AsyncGenerator[GraphEvent, None]:
        said: GraphEvent | None = None
        seconds = POLL_SECONDS
        while True:
            event = _as_event(await self.refresh())
            if event != said:
                said, seconds = event, POLL_SECONDS
                yield event
            if event.ends_run:
                return
            await self._calls.patience.sleep(seconds)
            seconds = min(seconds * 1.5, POLL_SECONDS_MAX)

    async def wait(
        self,
        *,
        timeout_seconds: float | None = None,
        check: bool = True,
        until_asked: bool = False,
        on_event: Callable[[GraphEvent], None] | None = None,
    ) -> GraphRun:
        """The run once it is over; with `until_asked`, also once it waits for an answer.

        Raises RunFailed if it did not succeed (unless `check` is off), and RunTimedOut when the time
        is up: the run goes on, and may be waited for again.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ended(until_asked, on_event)
        except TimeoutError as error:
            raise RunTimedOut(
                f"graph run {self.id} is not over within {timeout_seconds} s; it goes on",
                run_id=str(self.id),
            ) from error
        if check and self.run.status in ("failed", "cancelled"):
            error_ = self.run.error
            raise RunFailed(
                error_.message if error_ else f"graph run {self.id} was {self.run.status}",
                run_id=str(self.id),
                status=self.run.status,
                node=error_.node if error_ else None,
            )
        return self.run

    async def _ended(
        self, until_asked: bool, on_event: Callable[[GraphEvent], None] | None
    ) -> None:
        await self.refresh()
        while not self._is_reached(until_asked):
            async with aclosing(self.events()) as events:
                async for event in events:
                    if on_event:
                        on_event(event)
                    if until_asked and event.status == "waiting_for_user":
                        break
            await self.refresh()

    def _is_reached(self, until_asked: bool) -> bool:
        return self.run.has_ended or (until_asked and self.run.status == "waiting_for_user")

    async def cancel(self) -> GraphRun:
        """Stops its jobs, on the backends too; one that is over stays as it is."""
        return await self._act("cancel", {}, is_repeatable=True)

    async def retry(self, *, backend: str | None = None, max_tokens: int | None = None) -> GraphRun:
        """Goes on from where it failed, on `worker:ID` if named; what was done is used again.

        `max_tokens`: what the whole run may spend from now on, if that is more than before.
        """
        return await self._act("retry", {"backend": backend, "max_tokens": max_tokens})

    async def answer(
        self,
        choice: Choice,
        *,
        node: str | None = None,
        index: Sequence[int] = (),
        backend: str | None = None,
    ) -> GraphRun:
        """To a node whose backend is offline; it needn't be named if only one asks."""
        said = {"choice": choice, "node": node, "index": list(index), "backend": backend}
        return await self._act("answer", said)

    async def _act(
        self, act: str, body: dict[str, Any], *, is_repeatable: bool = False
    ) -> GraphRun:
        call = Call("POST", f"{self._path}/{act}", body, is_repeatable=is_repeatable)
        return self._heard(parsed(GraphRun, await self._calls.ask(call)))

    async def download(self, folder: Path, *, progress: Transferred | None = None) -> list[Path]:
        """Saves all files among its outputs; nothing is overwritten.

        Several have their number in front, `01_`, so that a folder has them in the album's order.
        """
        run = await self.refresh(executions=0)  # for URLs that are good from now on
        saved: list[Path] = []
        width = len(str(len(run.files)))
        for number, file in enumerate(run.files, start=1):
            front = f"{number:0{width}}_" if len(run.files) > 1 else ""
            path = free_path(folder, front + file.filename)
            saved.append(await fetch(self._calls, file.url, path, progress))
        return saved


def _event(found: ServerEvent) -> GraphEvent | None:
    """None: nothing that tells of a run, such as a sign of life."""
    try:
        data = json.loads(found.data)
        return GraphEvent.model_validate({**data, "kind": found.name})
    except (ValueError, TypeError, ValidationError):
        return None


def _as_event(run: GraphRun) -> GraphEvent:
    return GraphEvent(
        kind="end" if run.has_ended else "progress",
        run_id=run.id,
        status=run.status,
        nodes=run.nodes,
        questions=run.questions,
        error=run.error.message if run.error else None,
        **dict(run.progress),
    )
