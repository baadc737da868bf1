"""Whom the key is given to, and where a redirect may lead. Pure."""

import ipaddress

import httpx

from comfyfleet.kernel.errors import UnexpectedAnswer

DEFAULT_PORTS = {"http": 80, "https": 443}


def is_same_origin(one: httpx.URL, other: httpx.URL) -> bool:
    return _origin(one) == _origin(other)


def is_loopback(url: httpx.URL) -> bool:
    if url.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(url.host).is_loopback
    except ValueError:
        return False


def resolved(base: httpx.URL, link: str) -> httpx.URL:
    """A link of an answer: host-relative ones belong to the origin, whatever path the base has."""
    try:
        return base.copy_with(path="/", query=None).join(link)
    except httpx.InvalidURL as error:
        raise UnexpectedAnswer(f"a link can't be read: {error}") from error


def own_link(base: httpx.URL, link: str) -> httpx.URL:
    """A link that we follow with the key, so only to the server that the key is for."""
    url = resolved(base, link)
    if not is_same_origin(base, url):
        raise UnexpectedAnswer(f"the server links to {url.host}, which does not get its key")
    return url


def storage_link(base: httpx.URL, at: httpx.URL, location: str) -> httpx.URL:
    """Where a download is redirected to: encrypted, unless all of it stays on this machine."""
    try:
        url = at.join(location)
    except httpx.InvalidURL as error:
        raise UnexpectedAnswer(f"a redirect can't be read: {error}") from error
    on_this_machine = base.scheme == "http" and is_loopback(base) and is_loopback(url)
    if url.scheme != "https" and not (url.scheme == "http" and on_this_machine):
        raise UnexpectedAnswer(
            f"a download is redirected to {url.scheme}://{url.host}, not to https"
        )
    return url


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or DEFAULT_PORTS.get(url.scheme)
