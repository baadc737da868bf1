"""Routes that are suggested to callers of one that doesn't exist."""

import pytest
from fastapi import APIRouter

from comfyfleet.server.http.route_hints import DOCS, hint_for, known_routes

router = APIRouter(prefix="/api")


@router.get("/graphs")
@router.get("/graphs/{graph_id}")
@router.post("/graphs")
@router.post("/graphs/{graph_id}/runs")
@router.get("/graphs/{graph_id}/runs")
@router.get("/videos/{video_id}")
def act() -> None:
    """Stands for every route."""


@router.post("/graphs/{graph_id}/secret", include_in_schema=False)
def act_secretly() -> None:
    """A route that isn't described."""


KNOWN = known_routes(router.routes)


@pytest.mark.parametrize(
    ("method", "path", "routes"),
    [
        ("POST", "/api/graphs/7/execute", "POST /api/graphs/{graph_id}/runs"),
        ("GET", "/api/graph/7", "GET /api/graphs/{graph_id}"),
        ("DELETE", "/api/videos/7", "GET /api/videos/{video_id}"),
        ("PUT", "/api/graphs", "GET /api/graphs or POST /api/graphs"),
        ("GET", "/api/graphs/7/runs/8/9", None),
    ],
)
def test_similar_routes_are_suggested(method: str, path: str, routes: str | None) -> None:
    hint = hint_for(method, path, KNOWN)
    assert hint is not None
    assert hint.endswith(DOCS)
    assert routes is None or hint == f"Did you mean {routes}? {DOCS}"


@pytest.mark.parametrize("path", ["/", "/api", "/nowhere", "/prompts/api"])
def test_outside_of_the_api_nothing_is_suggested(path: str) -> None:
    assert hint_for("GET", path, KNOWN) is None


def test_a_name_like_no_other_is_answered_with_the_description() -> None:
    assert hint_for("GET", "/api/zzz/" + "a/" * 5_000, KNOWN) == DOCS
