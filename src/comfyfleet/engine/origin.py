"""Keeps pages of other sites from using an engine on the visitor's own machine."""

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit


def is_foreign(headers: Mapping[str, str]) -> bool:
    """Whether a browser sent this on behalf of another site's page."""
    if headers.get("sec-fetch-site") == "cross-site":
        return True
    host, origin = headers.get("host"), headers.get("origin")
    if origin == "null":  # a page without an origin, such as one in a sandbox
        return True
    if not host or not origin:
        return False
    return _is_other_site(host.lower(), origin.lower())


def _is_other_site(host: str, origin: str) -> bool:
    try:
        own, other = urlsplit(f"//{host}"), urlsplit(origin)
        ports = own.port, other.port
    except ValueError:
        return True
    if not own.hostname or not other.hostname or not _is_loopback(own.hostname):
        # Elsewhere the browser's own rules protect: a foreign page can't read answers.
        return False
    # A side that does not name its port is compared by name only.
    if None in ports:
        return own.hostname != other.hostname
    return own.netloc != other.netloc


def is_local_name(host: str | None) -> bool:
    """Whether a request names this machine by a name that no page of another site can have."""
    try:
        named = urlsplit(f"//{host or ''}".lower()).hostname
    except ValueError:
        return False
    return bool(named) and _is_loopback(named or "")


def _is_loopback(hostname: str) -> bool:
    try:
        return ipaddress.ip_address(hostname).is_loopback
    except ValueError:
        return hostname == "localhost" or hostname.endswith(".localhost")
