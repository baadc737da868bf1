"""Lookups of host names: within a deadline, one at a time for each tenant, in threads of their own."""

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from comfyfleet.errors import InputUnavailable, InvalidInput
from comfyfleet.transport.names import (
    LOOKUPS_PER_TENANT_MAX,
    THREADS_MAX,
    NameLookups,
    resolve_host,
)
from comfyfleet.transport.ssrf import address_spelled, is_public, parse_public_url, redirect_target


class SlowNames:
    """A name server of a customer, which answers when it likes."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer = asyncio.Event()

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if host.startswith("slow"):
            await self.answer.wait()
        return ["93.184.216.34"]


async def test_a_slow_name_ends_at_the_deadline() -> None:
    lookups = NameLookups(SlowNames(), seconds_max=0.01)
    async with asyncio.timeout(30):
        with pytest.raises(
            InputUnavailable, match=r"slow\.test could not be looked up within 0\.01 s"
        ):
            await lookups.addresses("slow.test", 80, "ada")


async def test_a_tenants_slow_names_take_no_more_than_their_places() -> None:
    """A lookup can't be interrupted, so it counts until it ends, however long ago its caller has left."""
    slow = SlowNames()
    lookups = NameLookups(slow, seconds_max=0.01)
    for number in range(LOOKUPS_PER_TENANT_MAX + 3):
        with pytest.raises(InputUnavailable):
            await lookups.addresses(f"slow{number}.test", 80, "ada")
    assert len(slow.asked) == LOOKUPS_PER_TENANT_MAX
    assert await lookups.addresses("fast.test", 80, "bob") == ["93.184.216.34"]
    slow.answer.set()
    while lookups._running:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0)
    assert await lookups.addresses("fast.test", 80, "ada") == ["93.184.216.34"]


async def test_exactly_as_many_names_as_a_tenant_may_look_up_are_looked_up_at_once() -> None:
    slow = SlowNames()
    lookups = NameLookups(slow)
    asked = [
        asyncio.create_task(lookups.addresses(f"slow{number}.test", 80, "ada"))
        for number in range(LOOKUPS_PER_TENANT_MAX)
    ]
    while len(slow.asked) < LOOKUPS_PER_TENANT_MAX:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0)
    slow.answer.set()
    assert await asyncio.gather(*asked) == [["93.184.216.34"]] * LOOKUPS_PER_TENANT_MAX


async def test_hanging_names_of_a_tenant_leave_threads_for_other_tenants(
    blocked: threading.Event,
) -> None:
    """More names hang than there are threads, all of one tenant."""
    lookups = NameLookups(resolve_host)
    hanging = [
        asyncio.create_task(lookups.addresses(f"slow{number}.test", 80, "ada"))
        for number in range(THREADS_MAX + 1)
    ]
    while not lookups._running:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0)
    assert await lookups.addresses("127.0.0.1", 80, "bob") == ["127.0.0.1"]
    blocked.set()
    await asyncio.gather(*hanging, return_exceptions=True)


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A system whose resolver answers nothing until the event is set."""
    event, real = threading.Event(), socket.getaddrinfo

    def answer(host: str, *arguments: Any, **named: Any) -> Any:
        if host.endswith(".test"):
            event.wait()
            raise OSError("no such name")
        return real(host, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    yield event
    event.set()


async def test_names_leave_the_threads_that_read_and_write_files_alone(
    blocked: threading.Event,
) -> None:
    lookups = NameLookups(resolve_host, seconds_max=0.01)
    for number in range(50):
        with pytest.raises(InputUnavailable):
            await lookups.addresses(f"slow{number}.test", 80, f"user{number}")
    try:
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(lambda: "read") == "read"
    finally:
        blocked.set()  # the end of the event loop waits for its threads


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST.",
        "a.localhost",
        "127.1",
        "0",
        "2130706433",
        "0x7f.1",
        "017700000001",
    ],
)
def test_spellings_of_loopback_are_read_without_a_lookup(host: str) -> None:
    address = address_spelled(host)
    assert address is not None
    assert not is_public(address)


@pytest.mark.parametrize("host", ["example.com", "cafe.example", "0x7f.example", "localhost.test"])
def test_other_names_need_a_lookup(host: str) -> None:
    assert address_spelled(host) is None


def test_a_redirect_to_an_address_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(InvalidInput, match="invalid address"):
        redirect_target(parse_public_url("https://example.com/a"), "http://[", ports=None)
