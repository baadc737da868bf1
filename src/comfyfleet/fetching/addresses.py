"""Which addresses are everybody's, and which lead into somebody's own network. Pure."""

import ipaddress
from typing import TypeAlias

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

# What the standard library calls global, or called so in some version, and is nobody's server.
_NOT_V4 = tuple(
    ipaddress.IPv4Network(each)
    for each in (
        "0.0.0.0/8",
        "168.63.129.16/32",  # what every machine on Azure reaches its own host by
        "192.0.0.0/24",
        "192.88.99.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
_NOT_V6 = tuple(
    ipaddress.IPv6Network(each)
    # Tunnels (Teredo and others, 6to4) end at a v4 address of the sender's choice.
    for each in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def parsed(text: str) -> Address | None:
    """None if it is no address. A zone (`fe80::1%eth0`) is no public address's."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """A server on the internet. What is not surely public is not."""
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not any(address in each for each in _NOT_V4)
    inside = _v4_inside(address)
    if inside is not None:
        return is_public(inside)
    is_unicast = address in _GLOBAL_V6 and not any(address in each for each in _NOT_V6)
    return is_unicast and address.is_global and not address.scope_id


def _v4_inside(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The address that a packet to this one would reach in the end."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None
