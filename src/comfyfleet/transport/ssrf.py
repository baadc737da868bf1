"""Guards against SSRF by parsing customers' URLs and refusing private addresses. All functions are
pure."""

import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import IPv6Address
from socket import inet_aton
from typing import TypeAlias
from urllib.parse import urljoin, urlsplit

from comfyfleet.errors import InvalidInput

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

# Networks without public servers that the standard library considers global, at least in some
# versions.
_NOT_V4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "168.63.129.16/32",  # the address that every machine on Azure uses to reach its own host
        "192.0.0.0/24",
        "192.88.99.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
_NOT_V6 = tuple(
    ipaddress.IPv6Network(network)
    # Tunnels (6to4, Teredo and others) end at an IPv4 address that the sender chooses.
    for network in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def parse_address(text: str) -> Address | None:
    """Parses an IP address. Returns None if the text isn't an address, or if it has a zone
    (`fe80::1%eth0`). Public addresses never have a zone."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


_SPELLED = re.compile(r"[0-9a-fx.]+", re.IGNORECASE)


def address_spelled(host: str) -> Address | None:
    """Returns the address of a host that needs no lookup, such as 127.1, 0x7f.1, 2130706433 or
    localhost. Returns None for other names."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return ipaddress.IPv4Address("127.0.0.1")
    if (address := parse_address(host)) is not None:
        return address
    try:
        # The system's resolver also uses inet_aton.
        return ipaddress.IPv4Address(inet_aton(name)) if _SPELLED.fullmatch(name) else None
    except OSError:
        return None


def is_public(address: Address) -> bool:
    """Checks whether the address is on the public internet. Returns False if this is uncertain."""
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not any(address in network for network in _NOT_V4)
    inside = _v4_inside(address)
    if inside is not None:
        return is_public(inside)
    is_unicast = address in _GLOBAL_V6 and not any(address in network for network in _NOT_V6)
    return is_unicast and address.is_global and not address.scope_id


def _v4_inside(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Returns the IPv4 address that a packet to this IPv6 address eventually reaches (mapped or
    NAT64), or None."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None


URL_CHARACTERS_MAX = 4000
PORTS = {"http": 80, "https": 443}
USUAL_PORTS = frozenset(PORTS.values())


@dataclass(frozen=True, slots=True)
class PublicUrl:
    scheme: str
    host: str  # as written in Host and in the certificate
    port: int
    path: str  # including the query

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    def at(self, address: Address) -> str:
        """Returns the same URL with the resolved address, so that the name is not resolved a second
        time."""
        host = f"[{address}]" if isinstance(address, IPv6Address) else str(address)
        return f"{self.scheme}://{host}:{self.port}{self.path}"


def parse_public_url(url: str, *, ports: frozenset[int] | None = USUAL_PORTS) -> PublicUrl:
    """Parses and checks a customer's URL. None for `ports` allows any port."""
    if len(url) > URL_CHARACTERS_MAX:
        raise _refused(f"it has more than {URL_CHARACTERS_MAX:,} characters")
    if any(character <= " " or character == "\\" for character in url) or not url.isprintable():
        raise _refused("it contains a space, a backslash or a control character")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _refused("it isn't a valid URL") from None
    if parts.scheme not in PORTS:
        raise _refused("it must begin with https:// or http://")
    if not host or "@" in parts.netloc or "%" in host:
        raise _refused("it must have a host, and no user name or zone")
    number = PORTS[parts.scheme] if port is None else port
    if ports is not None and number not in ports:
        raise _refused(f"the port must be {_listed(ports)}")
    path = parts.path or "/"
    query = f"?{parts.query}" if parts.query else ""
    return PublicUrl(parts.scheme, _ascii(host), number, f"{path}{query}")


def _listed(ports: Collection[int]) -> str:
    return f"one of {', '.join(map(str, sorted(ports)))}"


HostPort: TypeAlias = tuple[str, int]


def is_listed(target: PublicUrl, listed: Collection[HostPort]) -> bool:
    """Checks whether the pair of a URL's host and port is listed."""
    return (target.host, target.port) in listed


def parse_webhook_url(
    url: str, listed: Collection[HostPort], *, ports: frozenset[int] | None = USUAL_PORTS
) -> PublicUrl:
    """Parses the URL of a webhook. Hosts and ports that the operator has listed may be private."""
    target = parse_public_url(url, ports=None)
    if is_listed(target, listed):
        return target
    if ports is not None and target.port not in ports:
        place = (
            target.authority
            if target.port != PORTS[target.scheme]
            else f"{target.host}:{target.port}"
        )
        raise InvalidInput(
            f"the URL can't be used: the port must be {_listed(ports)}, unless the operator lists "
            f"{place}, exactly as in the URL, in COMFYFLEET_WEBHOOK_PRIVATE_HOSTS",
            field="url",
        )
    return parse_public_url(url, ports=ports)


def redirect_target(target: PublicUrl, location: str, *, ports: frozenset[int] | None) -> PublicUrl:
    """Returns the URL that a redirect leads to. Refuses redirects from https to http."""
    try:
        url = urljoin(target.url, location)
    except ValueError:  # for example, http://[
        raise _refused("it redirects to an invalid address") from None
    redirected = parse_public_url(url, ports=ports)
    if target.scheme == "https" and redirected.scheme == "http":
        raise _refused("it redirects from https to http")
    return redirected


def _ascii(host: str) -> str:
    try:
        return host.encode("idna").decode() if not host.isascii() else host
    except UnicodeError:
        raise _refused("the host name isn't valid") from None


def _refused(why: str) -> InvalidInput:
    return InvalidInput(f"the URL can't be used: {why}", field="url")
