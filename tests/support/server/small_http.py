"""A real HTTP server on a free port with fixed answers."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Answer:
    body: bytes
    status: int = 200
    content_type: str = "application/json"
    wait_seconds: float = 0.0
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class SmallServer:
    url: str
    answers: dict[str, Answer]
    asked: Counter[str] = field(default_factory=Counter)


@contextmanager
def serving(answers: dict[str, Answer], *methods: str) -> Iterator[SmallServer]:
    """Paths are matched with their query; any other is 404."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            small.asked[self.path] += 1
            answer = small.answers.get(self.path, Answer(b"no such page", 404, "text/plain"))
            time.sleep(answer.wait_seconds)
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(len(answer.body)))
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nobody reads it."""

    for method in methods or ("GET",):
        setattr(Handler, f"do_{method}", Handler.answer)

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A client that would not wait is part of the test."""

    server = Server(("127.0.0.1", 0), Handler)
    small = SmallServer(f"http://127.0.0.1:{server.server_port}", answers)
    # The poll interval is what shutting down waits for.
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield small
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
