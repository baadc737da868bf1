"""What clients were told, as control planes tell each other."""

import json
from uuid import uuid4

from comfyfleet.server.db import open_database
from comfyfleet.server.run_log import cursors
from comfyfleet.server.run_log.cursors import ClientCursors
from comfyfleet.server.run_log.model import Cursor, cursor_at

USER = uuid4()
# Of rows 1 to 7 the client has seen those of the attempt that started with row 2, and none from row 4 on of others.
HOLDING = Cursor(seen=7, start_id=2, row=6, floor=3)


def cursors_of(name: str) -> ClientCursors:
    return ClientCursors(open_database("postgresql://nowhere/x"), name)


def test_what_a_listening_client_was_told_is_known_elsewhere_a_round_later() -> None:
    here, there = cursors_of("a"), cursors_of("b")
    here.note(USER, "me", HOLDING)
    # It may still be on its way to the client.
    assert list(here.messages()) == []
    (message,) = here.messages()
    here.heard(message)
    assert here.of(USER, "me") is None
    there.heard(message)
    assert there.of(USER, "me") == HOLDING
    assert there.of(uuid4(), "me") is None
    assert list(here.messages()) == []


def test_what_a_client_that_goes_was_told_is_known_elsewhere_at_once() -> None:
    here, there = cursors_of("a"), cursors_of("b")
    here.note(USER, "me", HOLDING)
    newer = HOLDING._replace(seen=9, row=9)
    here.keep(USER, "me", newer)
    here.note(USER, "another", HOLDING)
    # The round hasn't ended, and that of the other client doesn't end earlier because one has left.
    (message,) = here.messages(ends_round=False)
    assert list(here.messages(ends_round=False)) == []
    there.heard(message)
    assert here.of(USER, "me") == there.of(USER, "me") == newer
    assert there.of(USER, "another") is None
    late = cursors_of("c")
    late.keep(USER, "me", HOLDING)
    (old,) = late.messages()
    there.heard(old)
    assert there.of(USER, "me") == newer


def test_control_planes_of_older_versions_are_understood_and_understand() -> None:
    here, there = cursors_of("a"), cursors_of("b")
    here.keep(USER, "me", HOLDING)
    (message,) = here.messages()
    said = json.loads(message)
    # They know one number. After less than it the client hears something twice, and after more it would miss rows.
    ((_, floor),) = said["seen"]
    assert floor == HOLDING.floor
    del said["places"]
    there.heard(json.dumps(said))
    assert there.of(USER, "me") == cursor_at(HOLDING.floor)


def test_many_clients_go_into_messages_that_fit() -> None:
    here = cursors_of("a")
    for number in range(250):
        at = 10**15 + number
        here.keep(USER, f"client-{number}", Cursor(at, at, at, at))
    messages = list(here.messages())
    assert len(messages) == 5
    assert max(map(len, messages)) <= 7_900
    assert len(here._seen) == 250
    assert cursors.CURSORS_MAX == 10_000
