"""Our API, ComfyUI's, Comfy API v2 and the editor share one origin, and no path is claimed twice."""

from collections.abc import AsyncIterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fastapi import APIRouter
from starlette.routing import Route as OwnRoute
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import documented_routes, plane_on

from comfyfleet.protocol.http import Route
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http import gateway, health
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.gateway import editor, sockets
from comfyfleet.server.http.gateway.auth import KEY_PREFIX
from comfyfleet.server.http.gateway.passthrough import paths_of

OURS, COMFYUI, V2, EDITOR = "our API", "ComfyUI's API", "Comfy API v2", "the editor"
V2_PATH = "/api/v2/"
REST = "{rest:path}"


class Claim(NamedTuple):
    owner: str
    method: str
    path: str

    @property
    def parts(self) -> tuple[str, ...]:
        """`*` for one part of a path, `**` for all the rest."""
        return tuple(_part(each) for each in self.path.removeprefix("/").split("/"))


def _part(part: str) -> str:
    if not part.startswith("{"):
        return part
    return "**" if part.endswith(":path}") else "*"


@pytest.fixture
async def plane(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with plane_on(sqlite_databases, tmp_path) as plane:
        yield plane


def all_claims(plane: ControlPlane) -> list[Claim]:
    own = [Claim(OURS, method, path) for method, path in _own_paths(plane)]
    theirs = [
        Claim(V2 if path.startswith(V2_PATH) else COMFYUI, method, path)
        for method, path in _paths(gateway.ROUTES)
    ]
    listening = [Claim(COMFYUI, "GET", path) for path in sockets.SOCKETS]
    edited = [Claim(EDITOR, method, path) for method, path in _paths(editor.ROUTES)]
    return [
        *own, *theirs, *listening, *edited,
        Claim(EDITOR, "POST", f"{editor.PREFIX}/{REST}"),
        Claim("keys in paths", "GET", f"{KEY_PREFIX}{REST}"),
    ]  # fmt: skip


def _own_paths(plane: ControlPlane) -> set[tuple[str, str]]:
    """Those of the API's document, and the few pages that are not in it."""
    documented = {
        (method.upper(), path)
        for path, methods in documented_routes(plane).items()
        for method in methods
    }
    pages = {
        (method, route.path)
        for router in (*create_app(plane).routes, health.router, health.metrics_router)
        for route in (router.routes if isinstance(router, APIRouter) else (router,))
        if isinstance(route, OwnRoute)
        for method in (route.methods or set()) - {"HEAD"}
    }
    return documented | pages


def _paths(routes: Sequence[Route[Any]]) -> list[tuple[str, str]]:
    return [(each.method, prefix + each.path) for each in routes for prefix in each.prefixes]


def may_meet(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether some path belongs to both."""
    if not one or not other:
        return not one and not other
    if "**" in (one[0], other[0]):
        return True
    is_same = one[0] == other[0] or "*" in (one[0], other[0])
    return is_same and may_meet(one[1:], other[1:])


async def test_the_paths_of_all_our_routes_are_known(plane: ControlPlane) -> None:
    """Nothing is read from a database to decide whether a call of these is passed on to a backend."""
    paths = set(paths_of(create_app(plane).routes))
    missing = {path for _, path in _own_paths(plane)} - paths
    assert missing == set()
    assert {"/healthz", "/readyz", "/metrics", "/docs", "/api/ai-jobs"} <= paths


async def test_all_four_have_routes(plane: ControlPlane) -> None:
    claims = all_claims(plane)
    assert {claim.owner for claim in claims} >= {OURS, COMFYUI, V2, EDITOR}
    assert len(claims) > 200


async def test_no_two_claim_one_path(plane: ControlPlane) -> None:
    clashes = [
        (one, other)
        for one, other in combinations(all_claims(plane), 2)
        if one.owner != other.owner and may_meet(one.parts, other.parts)
    ]
    assert clashes == []


async def test_none_has_two_routes_alike(plane: ControlPlane) -> None:
    claims = all_claims(plane)
    alike = [
        (one, other)
        for one, other in combinations(claims, 2)
        if (one.owner, one.method, one.parts) == (other.owner, other.method, other.parts)
    ]
    assert alike == []


COMFYUI_ROUTES = Path(__file__).with_name("comfyui_routes.txt")


async def test_every_route_of_comfyui_exists(plane: ControlPlane) -> None:
    """The list was read from ComfyUI 0.28.0, without its pages."""
    recorded = [line.split() for line in COMFYUI_ROUTES.read_text("utf-8").splitlines()]
    known = [claim for claim in all_claims(plane) if claim.owner in (COMFYUI, V2)]
    missing = [
        f"{method} {path}"
        for method, path in recorded
        if not any(
            claim.method == method and may_meet(claim.parts, Claim(COMFYUI, method, path).parts)
            for claim in known
        )
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        ("/api/jobs/{id}", "/api/jobs/cancel", True),
        ("/api/jobs/{id}", "/api/jobs/{id}/cancel", False),
        ("/api/{name}", "/{kind}/jobs", True),
        ("/internal/{rest:path}", "/internal/logs/raw", True),
        ("/internal/{rest:path}", "/internals", False),
        ("/view", "/view", True),
    ],
)
def test_paths_that_may_meet_are_found(one: str, other: str, meet: bool) -> None:
    assert may_meet(Claim("", "", one).parts, Claim("", "", other).parts) is meet
