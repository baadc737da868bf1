"""An instance metadata service as strict as EC2's: IMDSv2 only, expiring keys, 404 without a notice."""

import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY_SECONDS_MAX = 21_600
PREFIX = "/latest/meta-data/"


@dataclass
class MetadataServer:
    """Serves `values` by path. A response in `raw` replaces the value of its path."""

    url: str
    values: dict[str, str] = field(default_factory=dict)
    raw: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    keys: dict[str, float] = field(default_factory=dict)

    def announce_spot(self, *, seconds: float = 120, action: str = "terminate") -> datetime:
        at = (datetime.now(UTC) + timedelta(seconds=seconds)).replace(microsecond=0)
        moment = at.strftime("%Y-%m-%dT%H:%M:%SZ")
        self.values["spot/instance-action"] = json.dumps({"action": action, "time": moment})
        return at

    def advise_rebalance(self) -> None:
        moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.values["events/recommendations/rebalance"] = json.dumps({"noticeTime": moment})

    def forget_keys(self) -> None:
        self.keys.clear()

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        self.asked[f"{method} {path}"] += 1
        if path in self.raw:
            return self.raw[path]
        if path == "/latest/api/token":
            return self._new_key(method, headers)
        if method != "GET":
            return 405, b"Method Not Allowed"
        if self.keys.get(headers.get("x-aws-ec2-metadata-token", ""), 0) <= time.monotonic():
            return 401, b"Unauthorized"
        value = self.values.get(path.removeprefix(PREFIX)) if path.startswith(PREFIX) else None
        return (404, b"Not Found") if value is None else (200, value.encode())

    def _new_key(self, method: str, headers: dict[str, str]) -> tuple[int, bytes]:
        if method != "PUT":
            return 405, b"Method Not Allowed"
        if "x-forwarded-for" in headers:
            return 403, b"Forbidden"
        seconds = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
        if not seconds.isdigit() or not 1 <= int(seconds) <= KEY_SECONDS_MAX:
            return 400, b"Bad Request"
        key = secrets.token_urlsafe(40)
        self.keys[key] = time.monotonic() + int(seconds)
        return 200, key.encode()


@contextmanager
def serving_metadata(**values: str) -> Iterator[MetadataServer]:
    """On a free port. Names are paths with `__` for `/` and `_` for `-`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, body = metadata.answer(self.command, self.path, headers)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET  # noqa: N815

        def log_message(self, format: str, *arguments: object) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    metadata = MetadataServer(f"http://127.0.0.1:{server.server_port}")
    metadata.values |= {
        name.replace("__", "/").replace("_", "-"): value for name, value in values.items()
    }
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield metadata
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
