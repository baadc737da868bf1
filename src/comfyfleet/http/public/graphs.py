"""Graphs as customers keep, check and price them."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import Body as FromBody
from fastapi import Path, Response, status
from pydantic import Field

from comfyfleet.graphs import listing, service
from comfyfleet.graphs.mermaid import draw
from comfyfleet.graphs.model import Problem
from comfyfleet.graphs.parsing import parse_graph
from comfyfleet.graphs.service import Owner
from comfyfleet.graphs.stored import StoredGraph
from comfyfleet.graphs.validation import Checked
from comfyfleet.http.given import GivenPlane
from comfyfleet.http.problems import problems
from comfyfleet.http.public.auth import Reader, Writer
from comfyfleet.http.public.routing import PAGE_USUAL, Answer, Body, Limit, public_router
from comfyfleet.http.values import VersionNumber
from comfyfleet.plane import Plane
from comfyfleet.tenants.keys.model import Caller

router = public_router("graphs")
TOKENS_MAX = 2**53
EXAMPLE = {
    "name": "Draw",
    "nodes": [
        {"id": "draw", "type": "workflow", "workflow": "negative", "properties": {"width": 640}},
        {"id": "picture", "type": "output"},
    ],
    "connections": [{"from": "draw.output", "to": "picture.value"}],
}
GraphName = Annotated[
    str,
    Path(max_length=200, description="Its id, or its name: one's own before the tenant's."),
]
Document = Annotated[
    dict[str, Any],
    FromBody(
        description="The graph itself, or `{document}` with it, or with a text in JSON or YAML.",
        examples=[EXAMPLE],
    ),
]


class ProblemSeen(Answer):
    code: str = Field(description="Stable.", examples=["unknown_workflow"])
    message: str
    node: str
    port: str


class Verdict(Answer):
    valid: bool
    problems: list[ProblemSeen] = Field(description="All of them, each with its node and port.")
    warnings: list[ProblemSeen] = Field(description="What nobody could run just now.")


class GraphAnswer(Answer):
    id: UUID
    name: str
    version: int
    document: dict[str, Any]
    mermaid: str = Field(description="A picture of it, in Mermaid's language.")


class GraphSummary(Answer):
    id: UUID
    user_id: UUID = Field(description="Who made it, and alone may change it.")
    name: str
    version: int = Field(description="The newest.")
    created_at: datetime


class GraphPage(Answer):
    graphs: list[GraphSummary] = Field(description="The newest first.")
    next: UUID | None = Field(description="Ask on with before=next; null: that was all.")


class QuoteBody(Body):
    inputs: dict[str, Any] = Field(
        default_factory=dict, description="Without them, lists are as long as they may be."
    )
    version: VersionNumber | None = None


class QuoteAnswer(Answer):
    tokens_min: int
    tokens_max: int
    jobs_min: int
    jobs_max: int
    seconds_min: float
    seconds_max: float
    unknown_durations: list[str] = Field(description="Workflows that nobody has timed yet.")
    warnings: list[ProblemSeen] = Field(description="What nobody could run just now.")


def owner_of(caller: Caller) -> Owner:
    return Owner(caller.tenant.id, caller.user_id)


async def named(plane: Plane, caller: Caller, text: str) -> UUID:
    return await service.named(plane.graphs, owner_of(caller), text)


async def _document(body: Mapping[str, Any]) -> Any:
    return await service.document_from(body.get("document", body))


@router.post(
    "/graphs",
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": GraphAnswer, "description": "You have it stored already"}},
)
async def create(
    body: Document, plane: GivenPlane, caller: Writer, response: Response
) -> GraphAnswer:
    """Refused with all its problems, if it has any. The same name and content are stored once."""
    made, is_new = await service.stored_once(plane.graphs, owner_of(caller), await _document(body))
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return _seen(made)


@router.get("/graphs", responses=problems(404))
async def list_graphs(
    plane: GivenPlane, caller: Reader, before: UUID | None = None, limit: Limit = PAGE_USUAL
) -> GraphPage:
    """All of the tenant, without their documents: ask for one of them to get that."""
    found = await listing.graphs_of(plane.graphs, owner_of(caller), before=before, limit=limit + 1)
    page = found[:limit]
    return GraphPage(
        graphs=[GraphSummary(**asdict(each)) for each in page],
        next=page[-1].id if len(found) > limit else None,
    )


@router.post("/graphs/validate")
async def validate(body: Document, plane: GivenPlane, caller: Reader) -> Verdict:
    """What is wrong with a graph, before it is stored."""
    found, _ = await service.checked(plane.graphs, await _document(body))
    return _verdict(found)


@router.get("/graphs/{graph_id}", responses=problems(404))
async def show(
    graph_id: GraphName, plane: GivenPlane, caller: Reader, version: VersionNumber | None = None
) -> GraphAnswer:
    found = await named(plane, caller, graph_id)
    return _seen(await service.get(plane.graphs, owner_of(caller), found, version))


@router.delete(
    "/graphs/{graph_id}", status_code=status.HTTP_204_NO_CONTENT, responses=problems(404)
)
async def delete(graph_id: GraphName, plane: GivenPlane, caller: Writer) -> None:
    """By who made it. Its runs stay, and those that go on end as they would have."""
    await service.delete(plane.graphs, owner_of(caller), await named(plane, caller, graph_id))


@router.post(
    "/graphs/{graph_id}/versions", status_code=status.HTTP_201_CREATED, responses=problems(404)
)
async def new_version(
    graph_id: GraphName, body: Document, plane: GivenPlane, caller: Writer
) -> GraphAnswer:
    """By who made it. Runs that go on keep the version that they were started with."""
    owner, found = owner_of(caller), await named(plane, caller, graph_id)
    return _seen(await service.new_version(plane.graphs, owner, found, await _document(body)))


@router.post("/graphs/{graph_id}/validate", responses=problems(404))
async def validate_stored(graph_id: GraphName, plane: GivenPlane, caller: Reader) -> Verdict:
    """Whether it could be run now: workflows and workers may have changed since it was stored."""
    found_id = await named(plane, caller, graph_id)
    stored = await service.get(plane.graphs, owner_of(caller), found_id)
    found, _ = await service.checked(plane.graphs, dict(stored.document))
    return _verdict(found)


@router.post("/graphs/{graph_id}/quote", responses=problems(404))
async def quote(
    graph_id: GraphName, body: QuoteBody, plane: GivenPlane, caller: Reader
) -> QuoteAnswer:
    """What a run would cost, at least and at most, and how long it would take."""
    found = await service.quoted(
        plane.graphs,
        owner_of(caller),
        await named(plane, caller, graph_id),
        body.inputs,
        version=body.version,
    )
    return QuoteAnswer(
        tokens_min=found.tokens_min,
        tokens_max=found.tokens_max,
        jobs_min=found.jobs_min,
        jobs_max=found.jobs_max,
        seconds_min=found.seconds_min,
        seconds_max=found.seconds_max,
        unknown_durations=list(found.unknown_durations),
        warnings=_problems(found.warnings),
    )


def _verdict(found: Checked) -> Verdict:
    seen = _problems(found.problems)
    return Verdict(valid=not seen, problems=seen, warnings=_problems(found.warnings))


def _problems(found: tuple[Problem, ...]) -> list[ProblemSeen]:
    return [ProblemSeen(**each._asdict()) for each in found]


def _seen(graph: StoredGraph) -> GraphAnswer:
    return GraphAnswer(
        id=graph.id,
        name=graph.name,
        version=graph.version,
        document=dict(graph.document),
        mermaid=draw(parse_graph(dict(graph.document)).graph),
    )
