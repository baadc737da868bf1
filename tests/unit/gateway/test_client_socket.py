"""Which rows of the log a socket sends now, and which it leaves there."""

from uuid import UUID

import pytest

from comfyfleet.server.gateway.client_socket import GatewaySocket, LogState
from comfyfleet.server.run_log.model import LoggedEvents, cursor_at

A, B = UUID(int=1), UUID(int=2)


def row(
    number: int,
    job_id: UUID,
    start_id: int | None,
    *,
    is_last: bool = False,
    client_id: str | None = "me",
) -> LoggedEvents:
    return LoggedEvents(number, job_id, client_id, "p", [], is_last, start_id)


@pytest.fixture
def socket() -> GatewaySocket:
    socket = GatewaySocket("me", cursor_at(0))
    socket.state = LogState.CURRENT
    return socket


def sends(socket: GatewaySocket, new: LoggedEvents) -> bool:
    is_sent = socket.is_due(new)
    if is_sent:
        socket.note_sent(new)
    socket.note_read(new.id)
    return is_sent


def test_one_prompt_after_another_goes_out_at_once(socket: GatewaySocket) -> None:
    for new in (row(1, A, 1), row(2, A, 1, is_last=True), row(3, B, 3), row(4, B, 3, is_last=True)):
        assert sends(socket, new)
    assert socket.state is LogState.CURRENT
    assert socket.cursor.floor == socket.cursor.seen == 4


def test_a_prompt_that_starts_meanwhile_stays_in_the_log(socket: GatewaySocket) -> None:
    assert sends(socket, row(1, A, 1))
    assert not sends(socket, row(2, B, 2))
    assert sends(socket, row(3, A, 1))
    # Everything after row 1 is read again, but for what was sent of the first prompt.
    assert (socket.floor, socket.start_id, socket.row) == (1, 1, 3)
    assert socket.state is LogState.HOLDING


def test_when_the_shown_prompt_ends_the_log_is_read(socket: GatewaySocket) -> None:
    assert sends(socket, row(1, A, 1))
    assert not sends(socket, row(2, B, 2))
    assert sends(socket, row(4, A, 1, is_last=True))
    assert socket.state is LogState.READING
    assert not sends(socket, row(5, B, 2))


def test_rows_without_an_order_and_of_others_go_out_at_once(socket: GatewaySocket) -> None:
    assert sends(socket, row(1, A, 1))
    assert sends(socket, row(2, B, None))
    assert sends(socket, row(3, B, 3, client_id="other"))
    assert sends(socket, row(4, B, None, client_id=None))
    assert socket.state is LogState.CURRENT
    assert socket.job_id == A


def test_a_socket_that_reads_the_log_leaves_new_rows_there(socket: GatewaySocket) -> None:
    socket.state = LogState.READING
    assert not sends(socket, row(1, A, 1))
    assert (socket.seen, socket.floor) == (1, 0)


def test_a_requeued_prompt_is_over(socket: GatewaySocket) -> None:
    assert sends(socket, row(1, A, 1))
    assert not sends(socket, row(2, B, 2))
    socket.end_shown()
    assert socket.state is LogState.READING
    assert not socket.holds_back(row(2, B, 2))


def test_a_full_socket_takes_nothing_more_from_the_log(socket: GatewaySocket) -> None:
    while not socket.is_full:
        socket.tell("status", {})
    assert socket.frames_unsent == 1_001


async def test_a_client_that_returns_gets_again_what_its_connection_never_took(
    socket: GatewaySocket,
) -> None:
    for new in (row(1, A, 1), row(2, A, 1), row(3, A, 1)):
        socket.tell("executing", {})
        socket.tell("progress", {})
        assert sends(socket, new)
    assert socket.taken_cursor == cursor_at(0)
    for place, expected in enumerate([0, 1, 1, 2, 2, 3]):
        await socket.next_frame()
        socket.note_taken()
        assert socket.taken_cursor.row == expected, place
    # Rows without frames for this socket.
    assert sends(socket, row(4, B, 4, client_id="other"))
    assert socket.taken_cursor == socket.cursor == (4, 1, 3, 4)
