"""Graphs of a tenant: kept, checked, priced, run."""

from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote
from uuid import UUID, uuid4

from comfyfleet.client.answers import parsed
from comfyfleet.client.calls import Call, Calls
from comfyfleet.client.graph_model import (
    Graph,
    GraphEntry,
    GraphPage,
    GraphRun,
    GraphRunEntry,
    GraphRunPage,
    Quote,
    Verdict,
    WorkflowOffer,
    WorkflowOffers,
)
from comfyfleet.client.graph_runs import GraphRunHandle
from comfyfleet.client.model import Media
from comfyfleet.client.paging import PAGE, pages


class Graphs:
    """A document is a mapping, or a text in JSON or YAML. A graph is named by itself, its id or its name."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def create(self, document: Mapping[str, Any] | str) -> Graph:
        """Raises InvalidInput with all problems in `details["problems"]`. The same name and content
        are stored once: again, they are the same graph."""
        body = {"document": _document(document)}
        return parsed(Graph, await self._calls.ask(Call("POST", "/api/graphs", body)))

    async def delete(self, graph: Graph | UUID | str) -> None:
        """Only who made it may; its runs stay."""
        await self._calls.ask(Call("DELETE", _path(graph)))

    async def offered(self) -> list[WorkflowOffer]:
        """All that a node may name: published effects and offered workflows, with their properties."""
        return list(
            parsed(WorkflowOffers, await self._calls.ask(Call("GET", "/api/workflows"))).workflows
        )

    async def new_version(
        self, graph: Graph | UUID | str, document: Mapping[str, Any] | str
    ) -> Graph:
        """Runs that go on keep the version that they were started with."""
        call = Call("POST", f"{_path(graph)}/versions", {"document": _document(document)})
        return parsed(Graph, await self._calls.ask(call))

    async def validate(self, document: Mapping[str, Any] | str) -> Verdict:
        """What is wrong with a graph, before it is stored."""
        body = {"document": _document(document)}
        call = Call("POST", "/api/graphs/validate", body, is_repeatable=True)
        return parsed(Verdict, await self._calls.ask(call))

    async def validate_stored(self, graph: Graph | UUID | str) -> Verdict:
        """Whether it could be run now: workflows and workers may have changed since."""
        call = Call("POST", f"{_path(graph)}/validate", is_repeatable=True)
        return parsed(Verdict, await self._calls.ask(call))

    async def get(self, graph: Graph | UUID | str, *, version: int | None = None) -> Graph:
        call = Call("GET", _path(graph), query={"version": version})
        return parsed(Graph, await self._calls.ask(call))

    async def all(self, *, page_size: int = PAGE) -> AsyncIterator[GraphEntry]:
        """All of the tenant, the newest first."""
        async for page in pages(self._calls, "/api/graphs", GraphPage, {"limit": page_size}):
            for each in page.graphs:
                yield each

    async def quote(
        self,
        graph: Graph | UUID | str,
        inputs: Mapping[str, Any] | None = None,
        *,
        version: int | None = None,
    ) -> Quote:
        """Without inputs, lists are as long as they may be."""
        body = {"inputs": _plain(inputs or {}), "version": version}
        call = Call("POST", f"{_path(graph)}/quote", body, is_repeatable=True)
        return parsed(Quote, await self._calls.ask(call))

    async def run(
        self,
        graph: Graph | UUID | str,
        inputs: Mapping[str, Any] | None = None,
        *,
        version: int | None = None,
        max_tokens: int | None = None,
        idempotency_key: str | None = None,
    ) -> GraphRunHandle:
        """A run, started once: repeats after trouble carry the same key, made here if none is given.

        Inputs are named by their nodes; a file is given as the media that `upload` returned.
        """
        key = idempotency_key or str(uuid4())
        body = {
            "inputs": _plain(inputs or {}),
            "version": version,
            "max_tokens": max_tokens,
            "idempotency_key": key,
        }
        call = Call("POST", f"{_path(graph)}/runs", body, is_repeatable=True)
        run = parsed(GraphRun, await self._calls.ask(call))
        return GraphRunHandle(self._calls, run, idempotency_key=key)

    async def run_document(
        self,
        document: Mapping[str, Any] | str,
        inputs: Mapping[str, Any] | None = None,
        *,
        max_tokens: int | None = None,
        idempotency_key: str | None = None,
    ) -> GraphRunHandle:
        """As `run`; the graph is stored with its first run, and not if that is refused."""
        key = idempotency_key or str(uuid4())
        body = {
            "document": _document(document),
            "inputs": _plain(inputs or {}),
            "max_tokens": max_tokens,
            "idempotency_key": key,
        }
        call = Call("POST", "/api/graph-runs", body, is_repeatable=True)
        run = parsed(GraphRun, await self._calls.ask(call))
        return GraphRunHandle(self._calls, run, idempotency_key=key)

    async def get_run(self, run_id: UUID | str) -> GraphRunHandle:
        answer = await self._calls.ask(Call("GET", f"/api/graph-runs/{run_id}"))
        return GraphRunHandle(self._calls, parsed(GraphRun, answer))

    async def runs(
        self,
        *,
        graph: Graph | UUID | str | None = None,
        status: str | None = None,
        page_size: int = PAGE,
    ) -> AsyncIterator[GraphRunEntry]:
        """All of this user's, the newest first."""
        graph_id = None if graph is None else _id(graph)
        query = {"graph_id": graph_id, "status": status, "limit": page_size}
        async for page in pages(self._calls, "/api/graph-runs", GraphRunPage, query):
            for each in page.runs:
                yield each


def _id(graph: Graph | UUID | str) -> str:
    return str(graph.id if isinstance(graph, Graph) else graph)


def _path(graph: Graph | UUID | str) -> str:
    return f"/api/graphs/{quote(_id(graph), safe='')}"


def _document(given: Mapping[str, Any] | str) -> Any:
    return given if isinstance(given, str) else dict(given)


def _plain(value: Any) -> Any:
    """As JSON has it: media and ids by what they are called."""
    if isinstance(value, Media):
        return str(value.id)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
