"""Suggests similar routes of the customers' API if a route or method doesn't exist."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from starlette.routing import BaseRoute

SHOWN_MAX = 5
PATH_CHARACTERS_MAX = 500
API, DOCS = "api", "The API is described at /docs."


class KnownRoute(NamedTuple):
    method: str
    path: str
    segments: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"{self.method} {self.path}"


def known_routes(routes: Iterable[BaseRoute]) -> tuple[KnownRoute, ...]:
    pairs = {
        (method, path)
        for route in routes
        for path in (getattr(route, "path", ""),)
        for method in getattr(route, "methods", None) or ()
        if getattr(route, "include_in_schema", False) and method != "HEAD"
    }
    return tuple(KnownRoute(method, path, _segments(path)) for method, path in sorted(pairs))


def hint_for(method: str, path: str, known: Sequence[KnownRoute]) -> str | None:
    """Returns a sentence that suggests similar routes, or None for a path outside the API."""
    segments = _segments(path[:PATH_CHARACTERS_MAX])
    if segments[:1] != (API,) or len(segments) < 2:
        return None
    near = _near(method, segments, known)[:SHOWN_MAX]
    return f"Did you mean {' or '.join(route.text for route in near)}? {DOCS}" if near else DOCS


def _near(method: str, segments: tuple[str, ...], known: Sequence[KnownRoute]) -> list[KnownRoute]:
    """Returns similar routes.

    Routes with the same path and another method come first. If there are none, routes that differ
    in the last segment are returned, and otherwise the routes of the same area.
    """
    same = [route for route in known if _matches(route.segments, segments)]
    if same:
        return same
    area = _near_area(segments[1], known)
    inside = [route for route in known if route.segments[1:2] == (area,)]
    fixed = (API, area, *segments[2:])
    siblings = [
        route
        for route in inside
        if route.method == method and _matches(route.segments[:-1], fixed[:-1])
    ]
    return siblings or [route for route in inside if route.method == method] or inside


def _near_area(name: str, known: Sequence[KnownRoute]) -> str:
    areas = {route.segments[1] for route in known if len(route.segments) > 1}
    return next(iter(get_close_matches(name, areas, n=1)), "")


def _matches(pattern: Sequence[str], segments: Sequence[str]) -> bool:
    return len(pattern) == len(segments) and all(
        theirs.startswith("{") or theirs == ours
        for theirs, ours in zip(pattern, segments, strict=True)
    )


def _segments(path: str) -> tuple[str, ...]:
    return tuple(path.strip("/").split("/"))
