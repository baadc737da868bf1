"""What clients were told, as control planes tell each other."""

import json
from typing import Any
from uuid import uuid4

from comfyfleet.errors import Unavailable
from comfyfleet.server.db import open_database
from comfyfleet.server.gateway.client_socket import GatewaySocket
from comfyfleet.server.run_log import cursors
from comfyfleet.server.run_log.cursors import ClientCursors
from comfyfleet.server.run_log.model import Cursor, cursor_at

USER = uuid4()
# Of rows 1 to 7 the client has seen those of the attempt that started with row 2, and none from row 4 on of others.
HOLDING = Cursor(seen=7, start_id=2, row=6, floor=3)
NEWER = HOLDING._replace(seen=9, row=9)


class FakeHints:
    """Keeps what is sent, and fails while the database is away."""

    reach_others = True

    def __init__(self) -> None:
        self.is_away = False
        self.sent: list[str] = []

    async def send(self, payload: str) -> None:
        if self.is_away:
            raise Unavailable("the database is away")
        self.sent.append(payload)

    async def close(self) -> None: ...


def cursors_of(name: str, hints: Any = None) -> ClientCursors:
    cursors: Any = ClientCursors(open_database("postgresql://nowhere/x"), name)
    cursors._hints = hints or FakeHints()
    made: ClientCursors = cursors
    return made


async def messages(cursors: ClientCursors, *, ends_round: bool = True) -> list[str]:
    hints: Any = cursors._hints
    sent: list[str] = hints.sent
    before = len(sent)
    await cursors.send(ends_round=ends_round)
    return sent[before:]


async def test_what_a_listening_client_was_told_is_known_elsewhere_a_round_later() -> None:
    here, there = cursors_of("a"), cursors_of("b")
    here.note(USER, "me", GatewaySocket("me", HOLDING))
    # It may still be on its way to the client.
    assert await messages(here) == []
    (message,) = await messages(here)
    here.heard(message)
    assert here.of(USER, "me") is None
    there.heard(message)
    assert there.of(USER, "me") == HOLDING
    assert there.of(uuid4(), "me") is None
    assert await messages(here) == []


async def test_what_a_client_that_goes_was_told_is_known_elsewhere_at_once() -> None:
    here, there = cursors_of("a"), cursors_of("b")
    here.note(USER, "me", GatewaySocket("me", HOLDING))
    here.keep(USER, "me", NEWER)
    here.note(USER, "another", GatewaySocket("another", HOLDING))
    # The round hasn't ended, and that of the other client doesn't end earlier because one has left.
    (message,) = await messages(here, ends_round=False)
    assert await messages(here, ends_round=False) == []
    there.heard(message)
    assert here.of(USER, "me") == there.of(USER, "me") == NEWER
    assert there.of(USER, "another") is None
    late = cursors_of("c")
    late.keep(USER, "me", HOLDING)
    (old,) = await messages(late)
    there.heard(old)
    assert there.of(USER, "me") == NEWER


async def test_control_planes_of_older_versions_are_understood_and_understand() -> None:
    here, there = cursors_of("a"), cursors_of("b")
    here.keep(USER, "me", HOLDING)
    (message,) = await messages(here)
    said = json.loads(message)
    # They know one number. After less than it the client hears something twice, and after more it would miss rows.
    ((_, floor),) = said["seen"]
    assert floor == HOLDING.floor
    del said["places"]
    there.heard(json.dumps(said))
    assert there.of(USER, "me") == cursor_at(HOLDING.floor)


async def test_many_clients_go_into_messages_that_fit() -> None:
    here = cursors_of("a")
    for number in range(250):
        at = 10**15 + number
        here.keep(USER, f"client-{number}", Cursor(at, at, at, at))
    sent = await messages(here)
    assert len(sent) == 5
    assert max(map(len, sent)) <= 7_900
    assert len(here._seen) == 250
    assert cursors.CURSORS_MAX == 10_000


async def test_a_control_plane_that_stops_passes_on_all_positions_that_it_knows() -> None:
    hints = FakeHints()
    here, other, new = cursors_of("a", hints), cursors_of("b"), cursors_of("c")
    other.keep(USER, "left", HOLDING)
    (message,) = await messages(other)
    here.heard(message)
    here.keep(USER, "me", NEWER)
    assert len(await messages(here)) == 1  # that one is not there yet
    await here.close()
    for message in hints.sent:
        new.heard(message)
    assert (new.of(USER, "left"), new.of(USER, "me")) == (HOLDING, NEWER)


async def test_positions_that_could_not_be_sent_are_sent_later() -> None:
    hints = FakeHints()
    here, there = cursors_of("a", hints), cursors_of("b")
    here.keep(USER, "me", NEWER)
    hints.is_away = True
    await here.send()
    assert hints.sent == []
    hints.is_away = False
    await here.send()
    await here.wait_until_sent()
    for message in hints.sent:
        there.heard(message)
    assert there.of(USER, "me") == NEWER


async def test_a_lost_socket_that_ends_late_does_not_take_its_client_back() -> None:
    here, there = cursors_of("a"), cursors_of("b")
    there.keep(USER, "me", NEWER)
    (message,) = await messages(there)
    here.heard(message)
    here.keep(USER, "me", HOLDING)
    assert here.of(USER, "me") == NEWER


async def test_others_do_not_learn_a_position_that_the_connection_has_not_taken() -> None:
    here, there = cursors_of("a"), cursors_of("b")
    socket = GatewaySocket("me", cursor_at(3))
    socket.tell("executing", {})
    socket.note_read(7)
    here.note(USER, "me", socket)
    for message in [*await messages(here), *await messages(here)]:
        there.heard(message)
    assert there.of(USER, "me") == cursor_at(3)
