"""What clients were told, as control planes tell each other."""

from uuid import uuid4

from comfyfleet.server.db import open_database
from comfyfleet.server.run_log import cursors
from comfyfleet.server.run_log.cursors import ClientCursors

USER = uuid4()


def cursors_of(name: str) -> ClientCursors:
    return ClientCursors(open_database("postgresql://nowhere/x"), name)


def test_what_a_listening_client_was_told_is_known_elsewhere_a_round_later() -> None:
    here, there = cursors_of("a"), cursors_of("b")
    here.note(USER, "me", 7)
    # It may still be on its way to the client.
    assert list(here.messages()) == []
    (message,) = here.messages()
    here.heard(message)
    assert here.of(USER, "me") is None
    there.heard(message)
    assert there.of(USER, "me") == 7
    assert there.of(uuid4(), "me") is None
    assert list(here.messages()) == []


def test_what_a_client_that_goes_was_told_is_known_elsewhere_at_once() -> None:
    here, there = cursors_of("a"), cursors_of("b")
    here.note(USER, "me", 7)
    here.keep(USER, "me", 9)
    (message,) = here.messages()
    there.heard(message)
    assert here.of(USER, "me") == there.of(USER, "me") == 9
    late = message.replace("9]", "3]")
    there.heard(late)
    assert there.of(USER, "me") == 9


def test_many_clients_go_into_messages_that_fit() -> None:
    here = cursors_of("a")
    for number in range(250):
        here.keep(USER, f"client-{number}", 10**15 + number)
    messages = list(here.messages())
    assert len(messages) == 3
    assert max(map(len, messages)) <= 7_900
    assert len(here._seen) == 250
    assert cursors.CURSORS_MAX == 10_000
