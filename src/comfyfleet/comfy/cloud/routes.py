"""Calls about one thing, whose id stands in the path."""

from urllib.parse import quote

from comfyfleet.comfy.calls import Call


def about(method: str, route: str, its_id: str) -> Call:
    """Ids come from servers and users: none of them may lead to another route."""
    safe = quote(its_id, safe="").replace(".", "%2E")
    return Call(method, route, route.replace("{id}", safe))
