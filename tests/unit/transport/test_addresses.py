"""Public addresses, and all the others, which requests of strangers must not reach."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.errors import InvalidInput
from comfyfleet.transport.ssrf import is_public, parse_address, parse_public_url, redirect_target


@pytest.mark.parametrize(
    "text",
    [
        "0.0.0.0",  # noqa: S104 - not listened on
        "0.1.2.3", "10.0.0.1", "100.64.0.1", "127.0.0.1", "127.255.255.254",
        "168.63.129.16", "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.2.1", "192.88.99.1",
        "192.168.1.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.250",
        "240.0.0.1", "255.255.255.255",
        "::", "::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::a00:1",
        "64:ff9b:1::1", "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::", "3fff::1", "fc00::1",
        "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "5f00::1",
    ],
)  # fmt: skip
def test_what_leads_inside_is_not_public(text: str) -> None:
    address = parse_address(text)
    assert address is not None
    assert not is_public(address)


@pytest.mark.parametrize(
    "text",
    ["1.1.1.1", "93.184.216.34", "172.32.0.1", "2606:4700::1111", "2a00:1450:4001::1",
     "::ffff:1.1.1.1", "64:ff9b::101:101"],
)  # fmt: skip
def test_servers_on_the_internet_are_public(text: str) -> None:
    address = parse_address(text)
    assert address is not None
    assert is_public(address)


@given(st.ip_addresses(v=4))
def test_an_address_is_as_public_in_v6_clothes(address: ipaddress.IPv4Address) -> None:
    mapped = ipaddress.IPv6Address(f"::ffff:{address}")
    assert is_public(mapped) == is_public(address)


@given(st.ip_addresses())
def test_nothing_private_is_ever_public(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    if address.is_private or address.is_loopback or address.is_link_local or address.is_multicast:
        inside = getattr(address, "ipv4_mapped", None)
        assert inside is not None or not is_public(address)


def test_a_url_is_taken_apart() -> None:
    target = parse_public_url("HTTPS://Example.com/a%20b/c.png?x=1#y")
    assert (target.host, target.port, target.path) == ("example.com", 443, "/a%20b/c.png?x=1")
    assert target.url == "https://example.com/a%20b/c.png?x=1"
    assert parse_public_url("http://bücher.example").authority == "xn--bcher-kva.example"
    assert parse_public_url("http://[2606:4700::1]:80/").authority == "[2606:4700::1]"
    assert parse_public_url("http://a:8080", ports=None).authority == "a:8080"
    assert target.at(ipaddress.ip_address("1.1.1.1")) == "https://1.1.1.1:443/a%20b/c.png?x=1"
    v6 = target.at(ipaddress.ip_address("2606:4700::1"))
    assert v6.startswith("https://[2606:4700::1]:443/")


@pytest.mark.parametrize(
    "url",
    [
        "", "example.com", "ftp://example.com", "file:///etc/passwd", "gopher://a", "http://",
        "http://user:pw@example.com", "http://a@b", "http://example.com:22", "http://a:99999",
        "http://a:x", "http://exa mple.com", "http://a\\b", "http://a/\r\nHost: b", "http://[::1",
        "http://[fe80::1%25eth0]/", "http://a/" + "x" * 4000, "//example.com", "http://a\0.com",
    ],
)  # fmt: skip
def test_what_is_no_url_of_ours_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput):
        parse_public_url(url)


def test_a_redirect_may_be_relative_and_never_leaves_https() -> None:
    target = parse_public_url("https://example.com/a/b")
    assert redirect_target(target, "../c", ports=None).url == "https://example.com/c"
    assert redirect_target(target, "//other.example/x", ports=None).host == "other.example"
    for location in ("http://example.com/a", "file:///etc/passwd", "ftp://x"):
        with pytest.raises(InvalidInput):
            redirect_target(target, location, ports=None)
