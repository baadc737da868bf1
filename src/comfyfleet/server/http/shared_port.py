"""How `serve --processes N` shares one port: the parent accepts each connection and hands its socket to the
process with the fewest open connections.

Parent and child talk over a Unix socket, in records of a letter and a number. The child says when it has
taken a socket, when its client has sent a valid key, when it sends requests without one again, and when it is closed. The parent says how many
connections the child is to close after their next response, because it has more than its share.
"""

import asyncio
import contextlib
import errno
import logging
import math
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from comfyfleet.server.http.acceptor import Acceptor, ClientSocket, refuse, refuse_when_stopping
from comfyfleet.server.http.strangers import AddressLimiter, AddressSlot
from comfyfleet.server.http.tallies import StrangerSlot

logger = logging.getLogger(__name__)
_RECORD = struct.Struct("!cI")
NUMBERS = 2**32
READY, TAKEN, VALID, KEYLESS, CLOSED = b"r", b"t", b"v", b"k", b"c"  # from the child
SOCKET, MOVE = b"s", b"m"  # from the parent
READ_BYTES = 64 * 1024
FILES_PER_READ = 16
RECORDS_AT_ONCE = 64
# A child that doesn't take a socket within this time gets no further ones: its event loop stands still.
STUCK_SECONDS = 1.0
RETRY_SECONDS = 0.05
BALANCE_SECONDS = 1.0
# A child with more than this multiple of its share closes connections.
SHARE_MAX = 1.25
_FULL = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS, errno.ETOOMANYREFS)


def record(kind: bytes, number: int = 0) -> bytes:
    return _RECORD.pack(kind, number)


class _Records:
    """Splits a stream into records."""

    def __init__(self) -> None:
        self._rest = b""

    def of(self, data: bytes) -> Iterator[tuple[bytes, int]]:
        data = self._rest + data
        whole = len(data) - len(data) % _RECORD.size
        self._rest = data[whole:]
        yield from _RECORD.iter_unpack(data[:whole])


@dataclass(frozen=True, eq=False)
class HandedSocket:
    """An accepted connection on its way to a child. Until the child has taken it, it is kept, so that
    another child gets it if that one dies."""

    number: int
    client: socket.socket
    slot: AddressSlot
    at: float = 0.0


class ChildLine:
    """The parent's end of the line to one child."""

    def __init__(self, line: socket.socket, on_lost: Callable[["ChildLine"], object]) -> None:
        line.setblocking(False)
        self._line = line
        self._on_lost = on_lost
        self._records = _Records()
        self._slots: dict[int, AddressSlot] = {}
        self._untaken: dict[int, HandedSocket] = {}
        self.ready = asyncio.Event()
        self.is_lost = False
        asyncio.get_running_loop().add_reader(line.fileno(), self._read)

    @property
    def connections(self) -> int:
        """The number of its open connections."""
        return len(self._slots)

    def is_stuck(self, now: float) -> bool:
        oldest = next(iter(self._untaken.values()), None)
        return oldest is not None and now - oldest.at > STUCK_SECONDS

    def hand(self, handed: HandedSocket) -> bool:
        """Sends the child a socket; False if it takes none now."""
        try:
            files = [handed.client.fileno()]
            socket.send_fds(self._line, [record(SOCKET, handed.number)], files)
        except OSError as error:
            if error.errno not in _FULL:
                self._lose()
            return False
        self._untaken[handed.number] = handed
        self._slots[handed.number] = handed.slot
        return True

    def move(self, connections: int) -> None:
        """Tells the child how many connections it is to close after their next response."""
        with contextlib.suppress(OSError):
            self._line.send(record(MOVE, connections))

    def take_untaken(self) -> list[HandedSocket]:
        """Returns the sockets that a dead child has never taken."""
        untaken = list(self._untaken.values())
        self._untaken.clear()
        for handed in untaken:
            self._slots.pop(handed.number, None)
        return untaken

    def close(self) -> None:
        if self._line.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._line.fileno())
            self._line.close()
        for handed in self.take_untaken():
            handed.client.close()
            handed.slot.release()
        for slot in self._slots.values():
            slot.release()
        self._slots.clear()

    def drain(self) -> None:
        """Reads what a child sent before it died."""
        while self._read():
            pass
        self._lose()

    def _read(self) -> bool:
        """Returns False if there is nothing to read."""
        if self.is_lost:
            return False
        try:
            data = self._line.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self._lose()
            return False
        for kind, number in self._records.of(data):
            self._note(kind, number)
        return True

    def _note(self, kind: bytes, number: int) -> None:
        if kind == READY:
            self.ready.set()
        elif kind == TAKEN and (handed := self._untaken.pop(number, None)) is not None:
            handed.client.close()
        elif kind == VALID and number in self._slots:
            self._slots[number].release()
        elif kind == KEYLESS and number in self._slots:
            self._slots[number].resume()
        elif kind == CLOSED and (slot := self._slots.pop(number, None)) is not None:
            slot.release()

    def _lose(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._line.fileno())
            # Later, because the dispatcher may be handing it a socket.
            loop.call_soon(self._on_lost, self)


class ConnectionDispatcher:
    """Accepts connections, and hands each to the active child with the fewest."""

    def __init__(self, listener: socket.socket, limits: AddressLimiter) -> None:
        self._acceptor = Acceptor(listener, self._take)
        self._limits = limits
        self._numbers = count()
        self._lines: list[ChildLine] = []
        self._leaving: list[ChildLine] = []
        self._waiting: deque[HandedSocket] = deque()
        self._is_open = self._is_closed = False
        self._balancing: asyncio.TimerHandle | None = None
        self._retrying: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Begins to accept. Until then, connections wait in the system's queue."""
        self._is_open = True
        self._accept_if_served()
        self._balancing = asyncio.get_running_loop().call_later(BALANCE_SECONDS, self._balance)

    def close(self) -> None:
        """Closes the port, so that the system refuses further connections."""
        self._acceptor.close()
        self._is_open, self._is_closed = False, True
        for timer in (self._balancing, self._retrying):
            if timer is not None:
                timer.cancel()
        self._hand_waiting()

    def add(self, line: ChildLine) -> None:
        self._lines.append(line)
        self._hand_waiting()
        self._accept_if_served()

    def remove(self, line: ChildLine) -> None:
        """Gives the child no more connections; those that it never took go to others if it is dead."""
        if line in self._lines:
            self._lines.remove(line)
            self._leaving.append(line)
        if line.is_lost:
            if line in self._leaving:
                self._leaving.remove(line)
            self._waiting.extend(line.take_untaken())
        if not self._lines:
            self._acceptor.stop()
        self._hand_waiting()

    def _accept_if_served(self) -> None:
        if self._is_open and self._lines:
            self._acceptor.start()

    def _take(self, client: socket.socket, address: str) -> None:
        slot = self._limits.enter(address)
        if slot is None:
            refuse(client)
            return
        self._waiting.append(HandedSocket(next(self._numbers) % NUMBERS, client, slot))
        self._hand_waiting()

    def _hand_waiting(self) -> None:
        while self._waiting:
            if self._hand(self._waiting[0]):
                self._waiting.popleft()
            elif self._is_closed:
                self._refuse(self._waiting.popleft())
            else:
                self._retry_later()
                return

    def _refuse(self, handed: HandedSocket) -> None:
        """Answers a client that no child takes before this process stops."""
        refuse_when_stopping(handed.client)
        handed.slot.release()

    def _hand(self, handed: HandedSocket) -> bool:
        now = asyncio.get_running_loop().time()
        dated = HandedSocket(handed.number, handed.client, handed.slot, now)
        alive = [line for line in self._lines if not line.is_lost]
        by_load = sorted(alive, key=lambda line: (line.is_stuck(now), line.connections))
        return any(line.hand(dated) for line in by_load)

    def _retry_later(self) -> None:
        """All children are busy: waits before accepting more."""
        if self._lines and self._is_open:
            self._acceptor.pause(RETRY_SECONDS)
            if self._retrying is not None:
                self._retrying.cancel()
            loop = asyncio.get_running_loop()
            self._retrying = loop.call_later(RETRY_SECONDS, self._hand_waiting)

    def _balance(self) -> None:
        loop = asyncio.get_running_loop()
        self._balancing = loop.call_later(BALANCE_SECONDS, self._balance)
        if not self._lines:
            return
        # The connections of a child that is replaced will come to the others.
        total = sum(line.connections for line in (*self._lines, *self._leaving))
        share = total / len(self._lines)
        for line in self._lines:
            # Rounded up, so that two processes don't exchange a connection forever.
            above = line.connections - math.ceil(share)
            if line.connections > share * SHARE_MAX and above > 0:
                line.move(above)


class _RemoteSlot:
    """The slot of a connection whose address the parent counts."""

    __slots__ = ("_is_released", "_line", "_number")

    def __init__(self, line: "ParentLine", number: int) -> None:
        self._line = line
        self._number = number
        self._is_released = False

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._line.report(VALID, self._number)

    def resume(self) -> bool:
        """Counts again. Only the parent knows whether the address is above its limit; it refuses new
        connections then, while this one stays open within its user's limit."""
        if self._is_released:
            self._is_released = False
            self._line.report(KEYLESS, self._number)
        return True


class ParentLine:
    """The child's end of the line to its parent."""

    def __init__(self, line: socket.socket, stop: asyncio.Event) -> None:
        line.setblocking(False)
        self._line = line
        self._stop = stop
        self._records = _Records()
        self._files: deque[int] = deque()
        self._unsent = b""
        self._is_sending = False
        self._serve: Callable[[ClientSocket, StrangerSlot], None] | None = None
        self._move: Callable[[int], None] = lambda _: None
        self._hand_over = asyncio.Event()

    @property
    def hand_over(self) -> asyncio.Event:
        return self._hand_over

    def open(
        self,
        serve: Callable[[ClientSocket, StrangerSlot], None],
        move: Callable[[int], None],
    ) -> None:
        """Tells the parent that this process is ready to serve."""
        self._serve, self._move = serve, move
        self.report(READY)

    def take_rest(self) -> None:
        """Takes the sockets that the parent has sent and this process has not read yet."""
        while self._read():
            pass

    def start(self) -> None:
        """Reads what the parent sends; its end stops this process, too."""
        asyncio.get_running_loop().add_reader(self._line.fileno(), self._read)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._line.fileno())
        asyncio.get_running_loop().remove_writer(self._line.fileno())
        self._line.close()

    def report(self, kind: bytes, number: int = 0) -> None:
        """Sends a record; what happens in one turn of the event loop is sent together."""
        if not self._unsent and not self._is_sending:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent += record(kind, number)

    def _send(self) -> None:
        loop = asyncio.get_running_loop()
        if self._line.fileno() < 0:
            return
        try:
            self._unsent = self._unsent[self._line.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._unsent = b""  # the parent is gone
        if bool(self._unsent) != self._is_sending:
            self._is_sending = bool(self._unsent)
            if self._is_sending:
                loop.add_writer(self._line.fileno(), self._send)
            else:
                loop.remove_writer(self._line.fileno())

    def _read(self) -> bool:
        """Returns False if there is nothing more. The system returns at most one record with a socket at a time."""
        for _ in range(RECORDS_AT_ONCE):
            try:
                data, files, _, _ = socket.recv_fds(self._line, READ_BYTES, FILES_PER_READ)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                data, files = b"", []
            if not data:
                asyncio.get_running_loop().remove_reader(self._line.fileno())
                self._stop.set()
                return False
            self._files.extend(files)
            for kind, number in self._records.of(data):
                self._note(kind, number)
        return True

    def _note(self, kind: bytes, number: int) -> None:
        if kind == SOCKET:
            self._take(number)
        elif kind == MOVE:
            self._move(number)

    def _take(self, number: int) -> None:
        # The kernel drops a file that this process has no room for.
        accepted = self._socket() if self._files else None
        self.report(TAKEN, number)
        if accepted is None or self._serve is None:
            self.report(CLOSED, number)
            return
        client = ClientSocket(accepted, lambda: self.report(CLOSED, number))
        self._serve(client, _RemoteSlot(self, number))

    def _socket(self) -> socket.socket:
        found = socket.socket(fileno=self._files.popleft())
        if found.family == socket.AF_UNIX:
            return found
        # Not every system tells the protocol of a socket.
        return socket.socket(found.family, found.type, socket.IPPROTO_TCP, found.detach())
