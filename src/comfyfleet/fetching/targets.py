"""A customer's URL, taken apart and held against what we call. Pure."""

from dataclasses import dataclass
from ipaddress import IPv6Address
from urllib.parse import urljoin, urlsplit

from comfyfleet.fetching.addresses import Address
from comfyfleet.kernel.errors import InvalidInput

URL_CHARACTERS_MAX = 4000
PORTS = {"http": 80, "https": 443}
USUAL_PORTS = frozenset(PORTS.values())


@dataclass(frozen=True, slots=True)
class Target:
    scheme: str
    host: str  # as it is written in Host and in the certificate
    port: int
    path: str  # with the query

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    def at(self, address: Address) -> str:
        """The same, by the address that was looked up: nothing is looked up a second time."""
        host = f"[{address}]" if isinstance(address, IPv6Address) else str(address)
        return f"{self.scheme}://{host}:{self.port}{self.path}"


def target_of(url: str, *, ports: frozenset[int] | None = USUAL_PORTS) -> Target:
    """`ports` None: any."""
    if len(url) > URL_CHARACTERS_MAX:
        raise _refused(f"it has more than {URL_CHARACTERS_MAX:,} characters")
    if any(character <= " " or character == "\\" for character in url) or not url.isprintable():
        raise _refused("it holds a space, a backslash or a control character")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _refused("it can't be read") from None
    if parts.scheme not in PORTS:
        raise _refused("it must begin with https:// or http://")
    if not host or "@" in parts.netloc or "%" in host:
        raise _refused("it needs a host, and no user name or zone")
    number = PORTS[parts.scheme] if port is None else port
    if ports is not None and number not in ports:
        raise _refused(f"the port must be one of {', '.join(map(str, sorted(ports)))}")
    path = parts.path or "/"
    query = f"?{parts.query}" if parts.query else ""
    return Target(parts.scheme, _ascii(host), number, f"{path}{query}")


def redirected(target: Target, location: str, *, ports: frozenset[int] | None) -> Target:
    """Where a redirect leads; never from https back to http."""
    found = target_of(urljoin(target.url, location), ports=ports)
    if target.scheme == "https" and found.scheme == "http":
        raise _refused("it leads from https to http")
    return found


def _ascii(host: str) -> str:
    try:
        return host.encode("idna").decode() if not host.isascii() else host
    except UnicodeError:
        raise _refused("its host is no name") from None


def _refused(why: str) -> InvalidInput:
    return InvalidInput(f"the URL can't be used: {why}", field="url")
