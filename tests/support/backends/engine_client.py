"""A client that calls a served engine like any ComfyUI client."""

import contextlib
import json
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from io import BytesIO
from typing import Any

import httpx
import PIL.Image
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

WAIT_SECONDS_MAX = 30.0
# After the queue is empty the last events are still under way.
SETTLE_SECONDS = 0.05

Event = Any


class EventTimeout(AssertionError):
    """Raised if an expected event doesn't arrive in time."""


class SocketClient:
    """A websocket whose messages are collected by a separate thread."""

    def __init__(self, connection: ClientConnection) -> None:
        self.events: list[Event] = []
        self._connection = connection
        self._arrived = threading.Condition()
        self._next = 0
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def wait(self, kind: str, data: Mapping[str, Any] | None = None) -> Any:
        """The data of the next event of that type that holds these keys, after the last found."""
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        with self._arrived:
            while True:
                for index in range(self._next, len(self.events)):
                    if _is_wanted(self.events[index], kind, data or {}):
                        self._next = index + 1
                        return self.events[index][1]
                if not self._arrived.wait(deadline - time.monotonic()):
                    raise EventTimeout(f"no {kind} {data} in {self.names()[self._next :]}")

    def wait_for_pictures(self, count: int) -> None:
        """Until so many have come in all."""

        def have_come() -> bool:
            return sum(isinstance(each, dict) for each in self.events) >= count

        with self._arrived:
            if not self._arrived.wait_for(have_come, WAIT_SECONDS_MAX):
                raise EventTimeout(f"fewer than {count} pictures in {self.names()}")

    def names(self) -> list[str]:
        return [e[0] if isinstance(e, list) else f"binary {e['binary']}" for e in self.events]

    def send(self, data: object) -> None:
        self._connection.send(data if isinstance(data, str) else json.dumps(data))

    def ping(self) -> None:
        """Returns when the server has answered, which it does only while the socket is open."""
        assert self._connection.ping().wait(WAIT_SECONDS_MAX), "the server does not answer"

    def wait_until_closed(self) -> None:
        self._thread.join(WAIT_SECONDS_MAX)
        assert not self._thread.is_alive(), "the server does not close it"

    def close(self) -> None:
        self._connection.close()
        self._thread.join(WAIT_SECONDS_MAX)

    def _listen(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            for frame in self._connection:
                event = json_event(frame) if isinstance(frame, str) else binary_event(frame)
                with self._arrived:
                    self.events.append(event)
                    self._arrived.notify_all()


def _is_wanted(event: Event, kind: str, data: Mapping[str, Any]) -> bool:
    if not isinstance(event, list) or event[0] != kind:
        return False
    return all(key in event[1] and event[1][key] == value for key, value in data.items())


def json_event(frame: str) -> Event:
    message = json.loads(frame)
    return [message["type"], message["data"]]


def binary_event(frame: bytes) -> Event:
    kind, second = struct.unpack(">II", frame[:8])
    event = {"binary": kind, "length": len(frame)}
    if kind == 1:
        return {**event, "format": second, "image": picture(frame[8:])}
    head, rest = frame[8 : 8 + second], frame[8 + second :]
    if kind == 3:
        return {**event, "node_id": head.decode(), "text": rest.decode()}
    return {**event, "metadata": json.loads(head), "image": picture(rest)}


def picture(content: bytes) -> dict[str, Any]:
    with PIL.Image.open(BytesIO(content)) as found:
        summary: dict[str, Any] = {
            "format": found.format,
            "size": list(found.size),
            "mode": found.mode,
        }
        texts = sorted(getattr(found, "text", {}))
        return {**summary, "text_keys": texts} if texts else summary


class EngineClient:
    """HTTP and websocket connections to a server. `headers` are sent with each request."""

    def __init__(
        self, url: str, stack: contextlib.ExitStack, headers: Mapping[str, str] | None = None
    ) -> None:
        self.http = stack.enter_context(
            httpx.Client(base_url=url, timeout=WAIT_SECONDS_MAX, headers=headers)
        )
        self._url = url
        self._headers = headers
        self._stack = stack

    def listen(self, client_id: str | None = None, path: str = "/ws") -> SocketClient:
        start = "&" if "?" in path else "?"
        query = "" if client_id is None else f"{start}clientId={client_id}"
        url = f"{self._url.replace('http', 'ws', 1)}{path}{query}"
        connection = connect(url, max_size=None, additional_headers=self._headers)
        ear = SocketClient(self._stack.enter_context(connection))
        self._stack.callback(ear.close)
        ear.wait("status")
        return ear

    def submit(self, prompt: Mapping[str, Any], **more: Any) -> str:
        answer = self.http.post("/prompt", json={"prompt": prompt, **more})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["prompt_id"])

    def wait_idle(self, settle_seconds: float = SETTLE_SECONDS) -> None:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while self.http.get("/prompt").json()["exec_info"]["queue_remaining"]:
            assert time.monotonic() < deadline, "the queue does not get empty"
            time.sleep(0.005)
        time.sleep(settle_seconds)

    def history(self, prompt_id: str) -> Any:
        return self.http.get(f"/history/{prompt_id}").json()[prompt_id]


@contextlib.contextmanager
def open_engine_client(
    url: str, headers: Mapping[str, str] | None = None
) -> Iterator[EngineClient]:
    with contextlib.ExitStack() as stack:
        yield EngineClient(url, stack, headers)
