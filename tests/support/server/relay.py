"""A faulty HTTP proxy that counts requests, and cuts or refuses streams."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

LEFT_OUT = ("host", "connection", "transfer-encoding", "content-length", "content-encoding")


_WHY = b'{"error": {"code": "unavailable", "message": "come again", "details": {}}}'
UNAVAILABLE = b"HTTP/1.1 503 Unavailable\r\nContent-Length: %d\r\n\r\n%s" % (len(_WHY), _WHY)


@dataclass
class Relay:
    target: str
    cuts: int = 0  # streams that are cut after their first event
    has_streams: bool = True
    refusals: int = 0  # calls that are not answered at all, once a stream was cut
    is_degraded: bool = False  # they are answered: the database can't be reached
    url: str = ""
    asked: Counter[str] = field(default_factory=Counter)  # by method and last part of the path

    def count(self, *words: str) -> int:
        return sum(self.asked[word] for word in words)


@contextmanager
def relayed(
    target: str,
    *,
    cuts: int = 0,
    has_streams: bool = True,
    refusals: int = 0,
    is_degraded: bool = False,
) -> Iterator[Relay]:
    relay = Relay(target, cuts, has_streams, refusals, is_degraded)
    cuts_before_refusals = cuts

    class Handler(BaseHTTPRequestHandler):
        def pass_on(self) -> None:
            relay.asked[f"{self.command} {kind_of(self.path)}"] += 1
            if relay.cuts < cuts_before_refusals and relay.refusals > 0:
                relay.refusals -= 1
                self.close_connection = True
                self.wfile.write(UNAVAILABLE if relay.is_degraded else b"")
                return
            is_stream = self.path.endswith("/events")
            if is_stream and not relay.has_streams:
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {n: v for n, v in self.headers.items() if n.lower() not in LEFT_OUT}
            with httpx.stream(
                self.command, relay.target + self.path, headers=headers, content=body, timeout=60
            ) as answer:
                self.send_response(answer.status_code)
                self.send_header("Content-Type", answer.headers.get("content-type", ""))
                self.send_header("Connection", "close")
                is_cut = is_stream and relay.cuts > 0
                relay.cuts -= is_cut
                if is_cut:  # a length that is never reached
                    self.send_header("Content-Length", str(2**31))
                self.end_headers()
                for piece in answer.iter_bytes():
                    self.wfile.write(piece)
                    self.wfile.flush()
                    if is_cut and b"event:" in piece:
                        return

        def log_message(self, format: str, *arguments: object) -> None:
            """Nobody reads it."""

    for method in ("GET", "POST"):
        setattr(Handler, f"do_{method}", Handler.pass_on)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that hangs up is part of the test."""

    server = Server(("127.0.0.1", 0), Handler)
    relay.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield relay
    finally:
        with suppress(OSError):
            server.shutdown()
        thread.join()
        server.server_close()


def kind_of(path: str) -> str:
    """`run` for a graph run itself, otherwise the last part of the path."""
    parts = path.partition("?")[0].split("/")
    return "run" if parts[-2] == "graph-runs" else parts[-1]
