"""Pipelines of a user, and pipeline runs with their steps, candidates and judgments."""

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
    """Follows a pipeline run. `run` is its state as of the last call.

    `idempotency_key` is the key it was submitted with, if this client submitted it."""

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
        """Pauses the run. Submitted jobs continue, but no more are submitted."""
        return await self._now(Call("POST", f"{self._path}/pause", is_repeatable=True))

    async def resume(self) -> PipelineRun:
        return await self._now(Call("POST", f"{self._path}/resume", is_repeatable=True))

    async def cancel(self) -> PipelineRun:
        """Cancels the run and its queued jobs permanently. Running jobs finish, and their
        candidates are kept."""
        return await self._now(Call("POST", f"{self._path}/cancel", is_repeatable=True))

    async def change(
        self,
        *,
        variables: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        base_candidates: int | None = None,
    ) -> PipelineRun:
        """Changes the run for jobs that are submitted later. Omitted values don't change."""
        body: dict[str, Any] = {"base_candidates": base_candidates}
        if variables is not None:
            body["variables"] = dict(variables)
        if limits is not None:
            body["limits"] = plain_limits(limits)
        return await self._now(Call("PATCH", self._path, body, is_repeatable=True))

    async def retry(self, job_id: UUID | None = None) -> list[UUID]:
        """Retries one failed job or all of them, and returns their ids. Failed jobs are not retried
        automatically."""
        body = {"job_id": None if job_id is None else str(job_id)}
        return list((await self._ask(RetriedJobs, Call("POST", f"{self._path}/retry", body))).jobs)

    async def failures(self, *, limit: int = PAGE) -> list[FailureAnswer]:
        """Returns the jobs that failed and were not retried, newest first."""
        call = Call("GET", f"{self._path}/failures", params={"limit": limit})
        return list((await self._ask(Failures, call)).failures)

    async def wait(
        self,
        *,
        timeout_seconds: float | None = None,
        on_change: Callable[[PipelineRun], None] | None = None,
    ) -> PipelineRun:
        """Waits until the run has nothing left to do without a person, and returns it. `reason`
        explains why.

        Raises RunTimedOut after the timeout. The run then continues."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._wait_for_rest(on_change)
        except TimeoutError as error:
            raise RunTimedOut(
                f"pipeline run {self.id} has not finished within {timeout_seconds} s; it is still active",
                run_id=str(self.id),
            ) from error
        return self.run

    async def _wait_for_rest(self, on_change: Callable[[PipelineRun], None] | None) -> None:
        last_run, seconds = None, POLL_SECONDS
        while True:
            run = await self.refresh()
            if on_change and run != last_run:
                last_run, seconds = run, POLL_SECONDS
                on_change(run)
            if run.is_resting:
                return
            await self._calls.retry.sleep(seconds)
            seconds = min(seconds * 1.5, POLL_SECONDS_MAX)

    async def events(self, *, last_id: int = 0) -> AsyncGenerator[PipelineEvent, None]:
        """Yields each event once, in order, starting after `last_id`. The stream has no end.

        There is no last event, because a run may be judged at any time. Raises ServerUnavailable if
        no stream can be opened."""
        last = str(last_id) if last_id else ""
        listening = ResumableStream(self._calls, f"{self._path}/events", _parse_event, last_id=last)
        async with aclosing(listening.all_events()) as stream:
            async for event in stream:
                yield event
        await self.refresh()  # raises the actual error if the run itself can't be read
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
        """Yields candidates, oldest first. `score` sorts by the judge's score, highest first.
        `best` returns only one page."""
        query = {
            "step": step,
            "status": status,
            "parent": parent,
            "sort": sort,
            "limit": page_size,
        }
        path = f"{self._path}/candidates"
        async for page in fetch_pages(self._calls, path, CandidatePage, query, by="after"):
            for candidate in page.candidates:
                yield candidate

    async def candidate(self, candidate: Candidate | UUID | str) -> Candidate:
        return await self._ask(Candidate, Call("GET", self._of(candidate)))

    async def tree(self) -> tuple[Branch, ...]:
        """Returns the tree of candidates and their parents."""
        return (await self._ask(TreeAnswer, Call("GET", f"{self._path}/tree"))).tree

    async def judge(self, candidate: Candidate | UUID | str, verdict: Judgement) -> Candidate:
        """Judges a candidate with `approve`, `reject` (which stops its branch) or `winner`."""
        if verdict not in ("approve", "reject", "winner"):
            raise InvalidInput(f"the verdict must be approve, reject or winner, not {verdict!r}")
        call = Call("POST", f"{self._of(candidate)}/{verdict}", is_repeatable=True)
        return await self._ask(Candidate, call)

    async def undo(self, candidate: Candidate | UUID | str) -> Candidate:
        """Undoes the last judgment of a candidate."""
        return await self._ask(Candidate, Call("POST", f"{self._of(candidate)}/undo"))

    async def pair(self, *, step: int | None = None) -> tuple[Candidate, Candidate] | None:
        """Returns two candidates to compare next. Returns None if there are not enough
        candidates."""
        pair = await self._ask(PairAnswer, Call("GET", f"{self._path}/pair", params={"step": step}))
        return (pair.candidates[0], pair.candidates[1]) if len(pair.candidates) == 2 else None

    async def vote(self, winner: Candidate | UUID | str, loser: Candidate | UUID | str) -> Vote:
        """Adds a vote. It counts only once, even if the request is repeated."""
        body = {"winner": _candidate_id(winner), "loser": _candidate_id(loser), "id": str(uuid4())}
        return await self._ask(Vote, Call("POST", f"{self._path}/vote", body, is_repeatable=True))

    async def undo_vote(self, vote: Vote | UUID | str) -> Vote:
        """Undoes a vote. The scores are computed again from the other votes."""
        vote_id = vote.id if isinstance(vote, Vote) else vote
        return await self._ask(Vote, Call("POST", f"{self._path}/votes/{vote_id}/undo"))

    async def download(
        self,
        candidate: Candidate | UUID | str,
        folder: Path,
        *,
        progress: Transferred | None = None,
    ) -> Path:
        """Saves the candidate's file under its own path in the folder. The path is unique in the
        run."""
        fresh = await self.candidate(candidate)  # returns a fresh URL
        if fresh.url is None and fresh.text is not None and fresh.content_type == "text/plain":
            return await asyncio.to_thread(_write, candidate_path(folder, fresh.path), fresh.text)
        if fresh.url is None:
            raise NotFound(f"the file of candidate {fresh.id} was removed")
        return await download_file(
            self._calls, fresh.url, candidate_path(folder, fresh.path), progress
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
    """Returns the local path of a candidate. Refuses a path from the control plane that would leave
    the folder."""
    parts = PurePosixPath(path).parts
    # A colon denotes a Windows drive, and joining such a path would leave the folder.
    is_other = path.startswith("/") or not {"\\", ":"}.isdisjoint(path)
    if not parts or ".." in parts or is_other:
        raise InvalidInput(f"a candidate's path leads out of the folder: {path!r}")
    return folder.joinpath(*parts)


def _parse_event(event: ServerEvent) -> PipelineEvent | None:
    try:
        return PipelineEvent(id=int(event.id), kind=event.name, data=json.loads(event.data))
    except (ValueError, ValidationError):
        return None


class PipelinesApi:
    """Pipelines. A pipeline can be given as an object, an id or a name."""

    def __init__(self, calls: ApiCalls) -> None:
        self._calls = calls

    async def create(self, document: Mapping[str, Any] | str) -> Pipeline:
        """Stores a pipeline from a mapping, or from text in YAML or JSON. It can't be changed
        afterwards.

        Raises InvalidInput with all problems in `details["problems"]`."""
        body = {"document": document if isinstance(document, str) else dict(document)}
        return parse_answer(Pipeline, await self._calls.ask(Call("POST", "/api/pipelines", body)))

    async def get(self, pipeline: Pipeline | UUID | str) -> Pipeline:
        answer = await self._calls.ask(Call("GET", _path(pipeline)))
        return parse_answer(Pipeline, answer)

    async def delete(self, pipeline: Pipeline | UUID | str) -> None:
        """Deletes a pipeline. Its runs continue."""
        await self._calls.ask(Call("DELETE", _path(pipeline)))

    async def all(self, *, page_size: int = PAGE) -> AsyncIterator[Pipeline]:
        """Yields pipelines, newest first."""
        async for page in fetch_pages(
            self._calls, "/api/pipelines", PipelinePage, {"limit": page_size}
        ):
            for pipeline in page.pipelines:
                yield pipeline

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
        """Starts a run, exactly once. Retries use the same key, which is generated if none is
        given.

        `limits` can contain any field of `PipelineLimits`."""
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
        """Yields the user's runs, newest first, without their steps."""
        query = {
            "pipeline_id": None if pipeline is None else _pipeline_id(pipeline),
            "limit": page_size,
        }
        async for page in fetch_pages(
            self._calls, "/api/pipeline-runs", PipelineRunSummaries, query
        ):
            for run in page.runs:
                yield PipelineRun(**dict(run))


def _pipeline_id(pipeline: Pipeline | UUID | str) -> str:
    return str(pipeline.id if isinstance(pipeline, Pipeline) else pipeline)


def _path(pipeline: Pipeline | UUID | str) -> str:
    return f"/api/pipelines/{quote(_pipeline_id(pipeline), safe='')}"
