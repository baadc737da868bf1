"""Pipelines of a user, and their runs."""

from collections.abc import AsyncIterator, Mapping
from typing import Any
from uuid import UUID, uuid4

from comfyfleet.client.answers import parsed
from comfyfleet.client.calls import Call, Calls
from comfyfleet.client.paging import PAGE, pages
from comfyfleet.client.pipeline_model import Pipeline, PipelinePage, PipelineRun, PipelineRunPage
from comfyfleet.client.pipeline_runs import PipelineRunHandle, plain_limits


class Pipelines:
    """A pipeline is named by itself or its id."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def create(self, document: Mapping[str, Any] | str) -> Pipeline:
        """From a mapping, or a text in YAML or JSON; it is never changed afterwards.

        Raises InvalidInput with all problems in `details["problems"]`.
        """
        body = {"document": document if isinstance(document, str) else dict(document)}
        return parsed(Pipeline, await self._calls.ask(Call("POST", "/api/pipelines", body)))

    async def get(self, pipeline: Pipeline | UUID | str) -> Pipeline:
        answer = await self._calls.ask(Call("GET", f"/api/pipelines/{_id(pipeline)}"))
        return parsed(Pipeline, answer)

    async def delete(self, pipeline: Pipeline | UUID | str) -> None:
        """Its runs stay, and go on."""
        await self._calls.ask(Call("DELETE", f"/api/pipelines/{_id(pipeline)}"))

    async def all(self, *, page_size: int = PAGE) -> AsyncIterator[Pipeline]:
        """The newest first."""
        async for page in pages(self._calls, "/api/pipelines", PipelinePage, {"limit": page_size}):
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
        call = Call("POST", f"/api/pipelines/{_id(pipeline)}/runs", body, is_repeatable=True)
        run = parsed(PipelineRun, await self._calls.ask(call))
        return PipelineRunHandle(self._calls, run, idempotency_key=key)

    async def get_run(self, run_id: UUID | str) -> PipelineRunHandle:
        answer = await self._calls.ask(Call("GET", f"/api/pipeline-runs/{run_id}"))
        return PipelineRunHandle(self._calls, parsed(PipelineRun, answer))

    async def runs(
        self, *, pipeline: Pipeline | UUID | str | None = None, page_size: int = PAGE
    ) -> AsyncIterator[PipelineRun]:
        """All of this user's, the newest first, without their boards."""
        query = {"pipeline_id": None if pipeline is None else _id(pipeline), "limit": page_size}
        async for page in pages(self._calls, "/api/pipeline-runs", PipelineRunPage, query):
            for each in page.runs:
                yield each


def _id(pipeline: Pipeline | UUID | str) -> str:
    return str(pipeline.id if isinstance(pipeline, Pipeline) else pipeline)
