"""Access without a key under `comfyfleet up`, for programs of the user who started it.

Linux reports the user of each connection within the machine. Other systems don't, so programs there
must use a URL with the local user's key in its path, unless `--trust-local-users` is set.
"""

import asyncio
import ipaddress
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from starlette.requests import HTTPConnection

from comfyfleet.protocol.http import is_local_name
from comfyfleet.server.http.connections import connection_of
from comfyfleet.server.sign_in_links import SignInLinks

# Headers that proxies add. Behind a proxy on this machine, every client appears to be local.
FORWARDED = frozenset(
    {"forwarded", "via", "x-real-ip", "x-client-ip", "x-cluster-client-ip", "true-client-ip",
     "cf-connecting-ip", "fastly-client-ip", "x-original-host", "x-envoy-external-address"}
)  # fmt: skip
FORWARDED_PREFIX = "x-forwarded-"
# Headers that browsers add to requests from pages. Other programs don't send them.
OF_BROWSERS = ("origin", "sec-fetch-site", "sec-fetch-mode", "cookie")
TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
ESTABLISHED, USER_CELL = b"01", 7
UNKNOWN_USER = -1
MAPPED_PREFIX = bytes(10) + b"\xff\xff"  # precedes IPv4 addresses in IPv6 tables
Address: TypeAlias = tuple[str, int]
IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class LocalAccess:
    """Keyless access for the user who started `comfyfleet up`. `key` is the local user's API
    key."""

    key: str
    links: SignInLinks
    trusts_local_users: bool = False

    async def admits(self, connection: HTTPConnection) -> bool:
        """Checks whether a caller without a key is the user who started `comfyfleet up`, or any
        local user if `trusts_local_users` is set."""
        if not is_from_here(connection):
            return False
        return self.trusts_local_users or await _peer_user(connection) == own_user()

    async def admits_program(self, connection: HTTPConnection) -> bool:
        """Works like `admits`, but rejects browsers, which must sign in to use our API.

        Otherwise, any web page could send requests in the user's name.
        """
        is_browser = any(name in connection.headers for name in OF_BROWSERS)
        return not is_browser and await self.admits(connection)


def tells_users() -> bool:
    """Checks whether this system reports which user opened a connection."""
    return own_user() is not None and any(os.access(table, os.R_OK) for table in TCP_TABLES)


def own_user() -> int | None:
    """Returns the id of this process's user, or None on systems without user ids."""
    return os.getuid() if hasattr(os, "getuid") else None


def is_from_here(connection: HTTPConnection) -> bool:
    """Checks whether a request comes directly from a program on this machine.

    The request must use one of the machine's local names and must not pass through a proxy.

    An HTTP/1.0 request counts as proxied, because some proxies use HTTP/1.0 by default and send our
    own address as `Host`.
    """
    headers = connection.headers
    is_forwarded = any(name in FORWARDED or name.startswith(FORWARDED_PREFIX) for name in headers)
    return (
        _is_loopback(connection.client.host if connection.client else "")
        and is_local_name(headers.get("host"))
        and not is_forwarded
        and connection.scope.get("http_version") != "1.0"
    )


def _is_loopback(address: str) -> bool:
    try:
        return _unmapped(ipaddress.ip_address(address)).is_loopback
    except ValueError:
        return False


def _unmapped(address: IpAddress) -> IpAddress:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


async def _peer_user(connection: HTTPConnection) -> int:
    """Returns the id of the user who opened the connection. The id is read once per connection."""
    reused = connection_of(connection.scope)
    if reused is not None and reused.peer_user is not None:
        return reused.peer_user
    client, server = connection.scope.get("client"), connection.scope.get("server")
    if not client or not server:
        return UNKNOWN_USER
    # Runs in a thread, because the tables are large on machines with many connections.
    user = await asyncio.to_thread(find_user, tuple(client), tuple(server))
    if reused is not None:
        reused.peer_user = user
    return user


def find_user(client: Address, server: Address) -> int:
    """Returns the id of the user whose local program opened a connection to this process, or
    UNKNOWN_USER."""
    for table in TCP_TABLES:
        try:
            rows = table.read_bytes()
        except OSError:
            continue
        for near, far in zip(_cells(client), _cells(server), strict=True):
            row = _row_with(rows, b" %b %b %b " % (near, far, ESTABLISHED))
            if row is not None:
                return int(row.split()[USER_CELL])
    return UNKNOWN_USER


def _row_with(rows: bytes, ends: bytes) -> bytes | None:
    at = rows.find(ends)
    if at < 0:
        return None
    return rows[rows.rfind(b"\n", 0, at) + 1 : rows.find(b"\n", at)]


def _cells(address: Address) -> Iterator[bytes]:
    """Yields an address in the format of the TCP tables, such as `0100007F:1F40`.

    For an IPv4 address, also yields its IPv6 form.
    """
    host, port = address
    parsed_address = _unmapped(ipaddress.ip_address(host))
    forms = (
        [parsed_address.packed, MAPPED_PREFIX + parsed_address.packed]
        if parsed_address.version == 4
        else [parsed_address.packed]
    )
    for form in [*forms, *forms][:2]:
        yield b"%b:%04X" % (_in_kernel_order(form), port)


def _in_kernel_order(packed: bytes) -> bytes:
    """Converts an address to hexadecimal, with each 32-bit word in the machine's byte order."""
    words = (packed[start : start + 4] for start in range(0, len(packed), 4))
    order = -1 if sys.byteorder == "little" else 1
    return b"".join(word[::order] for word in words).hex().upper().encode()
