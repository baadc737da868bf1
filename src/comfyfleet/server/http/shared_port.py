"""Shares one port among the processes of `serve --processes N`.

The parent accepts each connection and passes its socket to the child process with the fewest open
connections. Parent and children communicate over Unix sockets, with records that consist of a
letter and a number. A child reports that it has received a socket, that the client has sent a valid
key, that the client sends requests without a valid key again, and that the socket is closed. If a
child has more than its share, the parent tells it how many connections to close after their next
response.
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
READY, TAKEN, VALID, KEYLESS, CLOSED = b"r", b"t", b"v", b"k", b"c"  # records sent by children
SOCKET, MOVE = b"s", b"m"  # records sent by the parent
READ_BYTES = 64 * 1024
FILES_PER_READ = 16
RECORDS_AT_ONCE = 64
# If a child doesn't receive a socket within this many seconds, its event loop is blocked. It then
# gets new connections only if no other child can receive them.
STUCK_SECONDS = 1.0
RETRY_SECONDS = 0.05
BALANCE_SECONDS = 1.0
# A child must close connections if it has more than this multiple of its share.
SHARE_MAX = 1.25
_FULL = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS, errno.ETOOMANYREFS)


def record(kind: bytes, number: int = 0) -> bytes:
    return _RECORD.pack(kind, number)


class _Records:
    """Splits received data into records."""

    def __init__(self) -> None:
        self._rest = b""

    def of(self, data: bytes) -> Iterator[tuple[bytes, int]]:
        data = self._rest + data
        whole = len(data) - len(data) % _RECORD.size
        self._rest = data[whole:]
        yield from _RECORD.iter_unpack(data[:whole])


@dataclass(frozen=True, eq=False)
class HandedSocket:
    """An accepted connection on its way to a child.

    The parent keeps the socket until the child has received it. If the child dies before that,
    another child gets the connection.
    """

    number: int
    client: socket.socket
    slot: AddressSlot
    at: float = 0.0


class ChildLine:
    """The parent's end of the Unix socket to one child."""

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
        """The number of the child's open connections."""
        return len(self._slots)

    def is_stuck(self, now: float) -> bool:
        oldest = next(iter(self._untaken.values()), None)
        return oldest is not None and now - oldest.at > STUCK_SECONDS

    def hand(self, handed: HandedSocket) -> bool:
        """Sends a socket to the child. Returns False if the child can't receive one now."""
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
        """Asks the child to close the given number of connections after their next response."""
        with contextlib.suppress(OSError):
            self._line.send(record(MOVE, connections))

    def take_untaken(self) -> list[HandedSocket]:
        """Returns and forgets the sockets that the child hasn't received."""
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
        """Reads the last records of a child that has died."""
        while self._read():
            pass
        self._lose()

    def _read(self) -> bool:
        """Reads and handles records. Returns False if there was nothing to read."""
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
            # Called later, because the dispatcher may be in the middle of handing over a socket.
            loop.call_soon(self._on_lost, self)


class ConnectionDispatcher:
    """Accepts connections and hands each one to the child with the fewest connections."""

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
        """Starts accepting connections. Until then, they wait in the operating system's queue."""
        self._is_open = True
        self._accept_if_served()
        self._balancing = asyncio.get_running_loop().call_later(BALANCE_SECONDS, self._balance)

    def close(self) -> None:
        """Closes the port, so that the operating system refuses new connections."""
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
        """Stops handing connections to the child. If it has died, other children get the
        connections that it hasn't received."""
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
        """Answers 503 to a client whose connection no child could receive before the shutdown."""
        refuse_when_stopping(handed.client)
        handed.slot.release()

    def _hand(self, handed: HandedSocket) -> bool:
        now = asyncio.get_running_loop().time()
        dated = HandedSocket(handed.number, handed.client, handed.slot, now)
        alive = [line for line in self._lines if not line.is_lost]
        by_load = sorted(alive, key=lambda line: (line.is_stuck(now), line.connections))
        return any(line.hand(dated) for line in by_load)

    def _retry_later(self) -> None:
        """Pauses accepting connections for a short time, because no child can receive one."""
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
        # Includes children that are being replaced, because their connections will move to the
        # others.
        total = sum(line.connections for line in (*self._lines, *self._leaving))
        share = total / len(self._lines)
        for line in self._lines:
            # The share is rounded up, so that two processes don't pass a connection back and forth
            # forever.
            above = line.connections - math.ceil(share)
            if line.connections > share * SHARE_MAX and above > 0:
                line.move(above)


class _RemoteSlot:
    """The slot of a connection that the parent counts for its address."""

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
        """Counts the connection for its address again, and always returns True.

        Only the parent knows whether the address exceeds its limit. In that case, the parent
        refuses new connections, but this one stays open and counts toward its user's limit.
        """
        if self._is_released:
            self._is_released = False
            self._line.report(KEYLESS, self._number)
        return True


class ParentLine:
    """The child's end of the Unix socket to its parent."""

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
        """Reports to the parent that this process is ready to serve."""
        self._serve, self._move = serve, move
        self.report(READY)

    def take_rest(self) -> None:
        """Receives the sockets that the parent has already sent to this process."""
        while self._read():
            pass

    def start(self) -> None:
        """Starts reading the parent's records. If the parent exits, this process stops as well."""
        asyncio.get_running_loop().add_reader(self._line.fileno(), self._read)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._line.fileno())
        asyncio.get_running_loop().remove_writer(self._line.fileno())
        self._line.close()

    def report(self, kind: bytes, number: int = 0) -> None:
        """Sends a record. All records of an event loop iteration are sent together."""
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
            self._unsent = b""  # the parent has exited, so the records are dropped
        if bool(self._unsent) != self._is_sending:
            self._is_sending = bool(self._unsent)
            if self._is_sending:
                loop.add_writer(self._line.fileno(), self._send)
            else:
                loop.remove_writer(self._line.fileno())

    def _read(self) -> bool:
        """Reads and handles records. Returns False if there is nothing more to read.

        Each call to the operating system returns at most one record with a socket.
        """
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
        # If this process has too many open files, the kernel drops the socket.
        accepted = self._socket() if self._files else None
        self.report(TAKEN, number)
        if accepted is None or self._serve is None:
            self.report(CLOSED, number)
            return
        client = ClientSocket(accepted, lambda: self.report(CLOSED, number))
        self._serve(client, _RemoteSlot(self, number))

    def _socket(self) -> socket.socket:
        client = socket.socket(fileno=self._files.popleft())
        if client.family == socket.AF_UNIX:
            return client
        # Not every operating system reports a socket's protocol.
        return socket.socket(client.family, client.type, socket.IPPROTO_TCP, client.detach())
