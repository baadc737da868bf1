"""Pipelines of a user, and pipeline runs: their board, their candidates and what people think of them."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote
from uuid import UUID, uuid4

from pydantic import ValidationError

from comfyfleet.api.pipelines import (
    Branch,
    CandidatePage,
    CandidateSort,
    CandidateStatus,
    FailureAnswer,
    Failures,
    PairAnswer,
    PipelineEvent,
    PipelinePage,
    PipelineRunSummaries,
    RetriedJobs,
    TreeAnswer,
)
from comfyfleet.client.files import download_file
from comfyfleet.client.model import Candidate, Judgement, Pipeline, PipelineRun, Vote
from comfyfleet.client.transport import (
    PAGE,
    Answer,
    ApiCalls,
    ResumableStream,
    fetch_pages,
    parse_answer,
)
from comfyfleet.errors import InvalidInput, NotFound, RunTimedOut, ServerUnavailable
from comfyfleet.transport.files import Transferred
from comfyfleet.transport.http import Call
from comfyfleet.transport.sse import ServerEvent

POLL_SECONDS = 1.0
POLL_SECONDS_MAX = 5.0


class PipelineRunHandle:
    """Follows one run of a pipeline. `run` is its state as of the last call.

    `idempotency_key` is the key that it was submitted with, where this client submitted it.
    """

    def __init__(
        self, calls: ApiCalls, run: PipelineRun, *, idempotency_key: str | None = None
    ) -> None:
        self._calls = calls
        self.run = run
        self.idempotency_key = idempotency_key

    @property
    def id(self) -> UUID:
        return self.run.id

    @property
    def _path(self) -> str:
        return f"/api/pipeline-runs/{self.id}"

    def __repr__(self) -> str:
        return f"PipelineRunHandle({self.id}, {self.run.status}, {self.run.reason})"

    async def _ask(self, kind: type[Answer], call: Call) -> Answer:
        return parse_answer(kind, await self._calls.ask(call))

    async def _now(self, call: Call) -> PipelineRun:
        self.run = await self._ask(PipelineRun, call)
        return self.run

    # The run

    async def refresh(self) -> PipelineRun:
        return await self._now(Call("GET", self._path))

    async def pause(self) -> PipelineRun:
        """What was submitted goes on; nothing more is."""
        return await self._now(Call("POST", f"{self._path}/pause", is_repeatable=True))

    async def resume(self) -> PipelineRun:
        return await self._now(Call("POST", f"{self._path}/resume", is_repeatable=True))

    async def cancel(self) -> PipelineRun:
        """For good, with what is queued; what runs is let end, and its candidates are kept."""
        return await self._now(Call("POST", f"{self._path}/cancel", is_repeatable=True))

    async def change(
        self,
        *,
        variables: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        base_candidates: int | None = None,
    ) -> PipelineRun:
        """Applies to what is submitted next; what is left out stays as it is."""
        body: dict[str, Any] = {"base_candidates": base_candidates}
        if variables is not None:
            body["variables"] = dict(variables)
        if limits is not None:
            body["limits"] = plain_limits(limits)
        return await self._now(Call("PATCH", self._path, body, is_repeatable=True))

    async def retry(self, job_id: UUID | None = None) -> list[UUID]:
        """Failed jobs, one or all, are made again: they are not by themselves."""
        body = {"job_id": None if job_id is None else str(job_id)}
        return list((await self._ask(RetriedJobs, Call("POST", f"{self._path}/retry", body))).jobs)

    async def failures(self, *, limit: int = PAGE) -> list[FailureAnswer]:
        """Jobs that failed and were not retried, the newest first."""
        call = Call("GET", f"{self._path}/failures", params={"limit": limit})
        return list((await self._ask(Failures, call)).failures)

    async def wait(
        self,
        *,
        timeout_seconds: float | None = None,
        on_change: Callable[[PipelineRun], None] | None = None,
    ) -> PipelineRun:
        """The run once nothing is left that it could do by itself: `reason` says why.

        Raises RunTimedOut when the time is up; the run goes on.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._wait_for_rest(on_change)
        except TimeoutError as error:
            raise RunTimedOut(
                f"pipeline run {self.id} is not done within {timeout_seconds} s; it goes on",
                run_id=str(self.id),
            ) from error
        return self.run

    async def _wait_for_rest(self, on_change: Callable[[PipelineRun], None] | None) -> None:
        said, seconds = None, POLL_SECONDS
        while True:
            run = await self.refresh()
            if on_change and run != said:
                said, seconds = run, POLL_SECONDS
                on_change(run)
            if run.is_resting:
                return
            await self._calls.retry.sleep(seconds)
            seconds = min(seconds * 1.5, POLL_SECONDS_MAX)

    async def events(self, *, last_id: int = 0) -> AsyncGenerator[PipelineEvent, None]:
        """Each once and in order, from after `last_id`, for as long as somebody listens.

        A run may be judged at any time, so there is no last one. Raises ServerUnavailable where no
        stream comes through.
        """
        last = str(last_id) if last_id else ""
        listening = ResumableStream(self._calls, f"{self._path}/events", _parse_event, last_id=last)
        async with aclosing(listening.all_events()) as heard:
            async for event in heard:
                yield event
        await self.refresh()  # says what is wrong, if more is than the stream
        raise ServerUnavailable(f"the events of pipeline run {self.id} can't be followed")

    # Candidates

    async def candidates(
        self,
        *,
        step: int | None = None,
        status: CandidateStatus | str | None = None,
        parent: UUID | None = None,
        sort: CandidateSort | str = CandidateSort.OLDEST,
        page_size: int = PAGE,
    ) -> AsyncGenerator[Candidate, None]:
        """The oldest first; by `score` those first to which the judge gave most; `best` is one page."""
        wanted = {
            "step": step,
            "status": status,
            "parent": parent,
            "sort": sort,
            "limit": page_size,
        }
        path = f"{self._path}/candidates"
        async for page in fetch_pages(self._calls, path, CandidatePage, wanted, by="after"):
            for each in page.candidates:
                yield each

    async def candidate(self, candidate: Candidate | UUID | str) -> Candidate:
        return await self._ask(Candidate, Call("GET", self._of(candidate)))

    async def tree(self) -> tuple[Branch, ...]:
        """Who came out of whom."""
        return (await self._ask(TreeAnswer, Call("GET", f"{self._path}/tree"))).tree

    async def judge(self, candidate: Candidate | UUID | str, verdict: Judgement) -> Candidate:
        """`approve`, `reject` (stops its branch) or `winner`."""
        if verdict not in ("approve", "reject", "winner"):
            raise InvalidInput(f"a candidate is approved, rejected or a winner, not {verdict!r}")
        call = Call("POST", f"{self._of(candidate)}/{verdict}", is_repeatable=True)
        return await self._ask(Candidate, call)

    async def undo(self, candidate: Candidate | UUID | str) -> Candidate:
        """The last that was said of it, as if it had never been said."""
        return await self._ask(Candidate, Call("POST", f"{self._of(candidate)}/undo"))

    async def pair(self, *, step: int | None = None) -> tuple[Candidate, Candidate] | None:
        """Two that are worth comparing; None where there are not two."""
        found = await self._ask(
            PairAnswer, Call("GET", f"{self._path}/pair", params={"step": step})
        )
        return (found.candidates[0], found.candidates[1]) if len(found.candidates) == 2 else None

    async def vote(self, winner: Candidate | UUID | str, loser: Candidate | UUID | str) -> Vote:
        """Counted once, however often it must be sent."""
        body = {"winner": _candidate_id(winner), "loser": _candidate_id(loser), "id": str(uuid4())}
        return await self._ask(Vote, Call("POST", f"{self._path}/vote", body, is_repeatable=True))

    async def undo_vote(self, vote: Vote | UUID | str) -> Vote:
        """The other votes are counted anew."""
        vote_id = vote.id if isinstance(vote, Vote) else vote
        return await self._ask(Vote, Call("POST", f"{self._path}/votes/{vote_id}/undo"))

    async def download(
        self,
        candidate: Candidate | UUID | str,
        folder: Path,
        *,
        progress: Transferred | None = None,
    ) -> Path:
        """Saved under its own path in the folder, which no other candidate has."""
        found = await self.candidate(candidate)  # for a URL that is good from now on
        if found.url is None and found.text is not None and found.content_type == "text/plain":
            return await asyncio.to_thread(_write, candidate_path(folder, found.path), found.text)
        if found.url is None:
            raise NotFound(f"the file of candidate {found.id} was removed")
        return await download_file(
            self._calls, found.url, candidate_path(folder, found.path), progress
        )

    def _of(self, candidate: Candidate | UUID | str) -> str:
        return f"{self._path}/candidates/{_candidate_id(candidate)}"


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


def plain_limits(limits: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in limits.items()
    }


def _candidate_id(candidate: Candidate | UUID | str) -> str:
    return str(candidate.id if isinstance(candidate, Candidate) else candidate)


def candidate_path(folder: Path, path: str) -> Path:
    """The control plane's word is not trusted with our disk."""
    parts = PurePosixPath(path).parts
    # A colon names a drive of Windows, which a path that is joined to ours would lead to.
    is_other = path.startswith("/") or not {"\\", ":"}.isdisjoint(path)
    if not parts or ".." in parts or is_other:
        raise InvalidInput(f"a candidate's path leads out of the folder: {path!r}")
    return folder.joinpath(*parts)


def _parse_event(found: ServerEvent) -> PipelineEvent | None:
    try:
        return PipelineEvent(id=int(found.id), kind=found.name, data=json.loads(found.data))
    except (ValueError, ValidationError):
        return None


class PipelinesApi:
    """A pipeline is named by itself, its id or its name."""

    def __init__(self, calls: ApiCalls) -> None:
        self._calls = calls

    async def create(self, document: Mapping[str, Any] | str) -> Pipeline:
        """From a mapping, or a text in YAML or JSON; it is never changed afterwards.

        Raises InvalidInput with all problems in `details["problems"]`.
        """
        body = {"document": document if isinstance(document, str) else dict(document)}
        return parse_answer(Pipeline, await self._calls.ask(Call("POST", "/api/pipelines", body)))

    async def get(self, pipeline: Pipeline | UUID | str) -> Pipeline:
        answer = await self._calls.ask(Call("GET", _path(pipeline)))
        return parse_answer(Pipeline, answer)

    async def delete(self, pipeline: Pipeline | UUID | str) -> None:
        """Its runs stay, and go on."""
        await self._calls.ask(Call("DELETE", _path(pipeline)))

    async def all(self, *, page_size: int = PAGE) -> AsyncIterator[Pipeline]:
        """The newest first."""
        async for page in fetch_pages(
            self._calls, "/api/pipelines", PipelinePage, {"limit": page_size}
        ):
            for each in page.pipelines:
                yield each

    async def run(
        self,
        pipeline: Pipeline | UUID | str,
        base_candidates: int,
        variables: Mapping[str, Any] | None = None,
        *,
        limits: Mapping[str, Any] | None = None,
        target_folder: str | None = None,
        idempotency_key: str | None = None,
    ) -> PipelineRunHandle:
        """A run, started once: repeats after trouble carry the same key, made here if none is given.

        `limits` are any of those in `PipelineLimits`.
        """
        key = idempotency_key or str(uuid4())
        body = {
            "base_candidates": base_candidates,
            "variables": dict(variables or {}),
            "limits": plain_limits(limits or {}),
            "target_folder": target_folder,
            "idempotency_key": key,
        }
        call = Call("POST", f"{_path(pipeline)}/runs", body, is_repeatable=True)
        run = parse_answer(PipelineRun, await self._calls.ask(call))
        return PipelineRunHandle(self._calls, run, idempotency_key=key)

    async def get_run(self, run_id: UUID | str) -> PipelineRunHandle:
        answer = await self._calls.ask(Call("GET", f"/api/pipeline-runs/{run_id}"))
        return PipelineRunHandle(self._calls, parse_answer(PipelineRun, answer))

    async def runs(
        self, *, pipeline: Pipeline | UUID | str | None = None, page_size: int = PAGE
    ) -> AsyncIterator[PipelineRun]:
        """All of this user's, the newest first, without their boards."""
        query = {
            "pipeline_id": None if pipeline is None else _pipeline_id(pipeline),
            "limit": page_size,
        }
        async for page in fetch_pages(
            self._calls, "/api/pipeline-runs", PipelineRunSummaries, query
        ):
            for each in page.runs:
                yield PipelineRun(**dict(each))


def _pipeline_id(pipeline: Pipeline | UUID | str) -> str:
    return str(pipeline.id if isinstance(pipeline, Pipeline) else pipeline)


def _path(pipeline: Pipeline | UUID | str) -> str:
    return f"/api/pipelines/{quote(_pipeline_id(pipeline), safe='')}"
