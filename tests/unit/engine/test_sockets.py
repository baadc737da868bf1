"""Who hears what, and what becomes of who does not listen."""

import asyncio
from typing import Any

from comfyfleet.protocol.sockets import BACKLOG_FRAMES_MAX, Socket, Sockets


async def drain(socket: Socket) -> list[Any]:
    frames = []
    while True:
        try:
            frames.append(await asyncio.wait_for(socket.next_frame(), 0.05))
        except TimeoutError:
            return frames


async def test_what_is_said_in_a_thread_arrives_in_order() -> None:
    sockets = Sockets()
    sockets.attach(asyncio.get_running_loop())
    alice, bob = sockets.connect("alice"), sockets.connect("bob")

    def speak() -> None:
        for number in range(3):
            sockets.send("count", {"n": number}, "alice")
            sockets.send_frame(b"to all")

    await asyncio.to_thread(speak)
    heard = await drain(alice)
    assert [frame for frame in heard if frame != b"to all"] == [
        f'{{"type": "count", "data": {{"n": {number}}}}}' for number in range(3)
    ]
    assert heard[1::2] == [b"to all"] * 3
    assert await drain(bob) == [b"to all"] * 3


async def test_a_client_that_does_not_read_is_cut_off_and_delays_nobody() -> None:
    sockets = Sockets()
    sockets.attach(asyncio.get_running_loop())
    idle = sockets.connect("idle")
    for _ in range(BACKLOG_FRAMES_MAX + 1):
        sockets.send_frame(b"x")
    await asyncio.sleep(0)
    assert idle.overrun.is_set()


async def test_nothing_is_written_for_who_is_not_there() -> None:
    sockets = Sockets()
    sockets.attach(asyncio.get_running_loop())
    unwritable: Any = {"a set can't be JSON": {1}}
    sockets.send("event", unwritable)
    sockets.connect("alice")
    sockets.send("event", unwritable, "bob")
    sockets.send("event", unwritable, ["no", "id"])


async def test_only_who_said_so_gets_metadata() -> None:
    sockets = Sockets()
    sockets.connect("alice").features = {"supports_preview_metadata": True}
    sockets.connect("bob").features = {"supports_preview_metadata": "yes"}
    wants = [sockets.wants_metadata(name) for name in ("alice", "bob", "carol", None)]
    assert wants == [True, False, False, False]
